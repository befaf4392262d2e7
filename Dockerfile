# RAGEN on CPUs; what is installed takes 1.4 GB, most of it torch.
#
#     docker build -t ragen .
#     docker run --rm -it -v ragen:/home/agent ragen train bandit
#     docker run --rm -it -v ragen:/home/agent -p 127.0.0.1:7246:7246 ragen view --host 0.0.0.0
FROM python:3.12-slim
WORKDIR /opt/ragen
COPY . .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt . \
    && useradd --create-home --uid 1000 agent
USER 1000
WORKDIR /home/agent
ENTRYPOINT ["ragen"]
CMD ["--help"]
