"""The published decoder class, from the PyPI package ``qwen-tts``, as a reference.

Its package pins and imports much that decoding does not need, so only the one modelling file is
loaded. It wants torch, numpy and transformers, in the version that the package pins::

    pip install transformers==4.57.3
    pip install --no-deps qwen-tts==0.1.1
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import MissingDependencyError

if TYPE_CHECKING:
    from codecstream_export import DecoderConfig, EagerDecoder
    from codecstream_export.reference import Decode

__all__ = ["load_official", "official_decoder"]

_FOLDERS = {
    "qwen_tts": "",
    "qwen_tts.core": "/core",
    "qwen_tts.core.tokenizer_12hz": "/core/tokenizer_12hz",
}
_MODULE = "qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2"


def load_official(decoder: EagerDecoder) -> Decode:
    """Return the published class's decoding of codes, with the weights of ``decoder``.

    Raises:
        MissingDependencyError: The class is not installed; the message has the pip lines.
    """
    import torch

    official = official_decoder(decoder.config)
    official.load_state_dict(decoder.state_dict(), strict=True)

    def decode(codes: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            pcm: NDArray[np.float32] = official(torch.from_numpy(codes).T[None])[0, 0].numpy()
        return pcm

    return decode


def official_decoder(config: DecoderConfig) -> Any:
    """Return an untrained ``Qwen3TTSTokenizerV2Decoder``."""
    module = _import_modelling_file()
    settings = module.Qwen3TTSTokenizerV2DecoderConfig(**asdict(config))
    settings._attn_implementation = "eager"
    return module.Qwen3TTSTokenizerV2Decoder(settings).eval()


def _import_modelling_file() -> Any:
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    spec = importlib.util.find_spec("qwen_tts")
    if importlib.util.find_spec("transformers") is None or spec is None:
        raise MissingDependencyError(
            "the official decoder class is not installed: pip install transformers==4.57.3, then "
            "pip install --no-deps qwen-tts==0.1.1"
        )
    assert spec.submodule_search_locations
    before = {name: sys.modules.get(name) for name in _FOLDERS}
    try:
        for name, folder in _FOLDERS.items():
            stub = ModuleType(name)
            stub.__path__ = [spec.submodule_search_locations[0] + folder]
            sys.modules[name] = stub
        with warnings.catch_warnings():  # of transformers about itself, at import
            warnings.simplefilter("ignore")
            return importlib.import_module(_MODULE)
    finally:
        # Stubs are no packages: whoever imports qwen_tts next must get the real one.
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
