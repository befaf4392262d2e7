# RAGEN with vLLM on NVIDIA GPUs; several GB, most of it CUDA. The host needs its driver and the NVIDIA Container Toolkit.
#
#     docker build -t ragen:cuda -f docker/cuda.Dockerfile .
#     docker run --rm -it --gpus all --ipc host -v ragen:/home/agent ragen:cuda train paper/sokoban --rollout.sampler vllm
FROM python:3.12-slim
# Triton, which vLLM and torch use, compiles its launchers with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ragen
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[vllm]' \
    && useradd --create-home --uid 1000 agent
USER 1000
WORKDIR /home/agent
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["ragen"]
CMD ["--help"]
