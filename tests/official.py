"""The published decoder class, from the PyPI package qwen-tts, to hold ours against."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest

from codecstream_export import DecoderConfig

_FOLDERS = {
    "qwen_tts": "",
    "qwen_tts.core": "/core",
    "qwen_tts.core.tokenizer_12hz": "/core/tokenizer_12hz",
}
_MODULE = "qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2"


def official_decoder(config: DecoderConfig) -> Any:
    """Return an untrained ``Qwen3TTSTokenizerV2Decoder``, or skip the test that asks for it."""
    module = _official_module()
    settings = module.Qwen3TTSTokenizerV2DecoderConfig(**asdict(config))
    settings._attn_implementation = "eager"
    return module.Qwen3TTSTokenizerV2Decoder(settings).eval()


def _official_module() -> Any:
    """Import the one modelling file; the package around it wants librosa and more."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    spec = importlib.util.find_spec("qwen_tts")
    if importlib.util.find_spec("transformers") is None or spec is None:
        reason = "the official class needs transformers 4.57.3 and, with --no-deps, qwen-tts 0.1.1"
        if os.environ.get("CODECSTREAM_REQUIRE_OFFICIAL"):  # scripts/test installs them
            pytest.fail(reason)
        pytest.skip(reason)
    assert spec.submodule_search_locations
    for name, folder in _FOLDERS.items():
        stub = ModuleType(name)
        stub.__path__ = [spec.submodule_search_locations[0] + folder]
        sys.modules[name] = stub
    with warnings.catch_warnings():  # of transformers about itself, at import
        warnings.simplefilter("ignore")
        return importlib.import_module(_MODULE)
