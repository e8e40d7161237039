"""The published decoder class, to hold ours against; the test is skipped where it is missing."""

from __future__ import annotations

import os
from typing import Any

import pytest

from codecstream import MissingDependencyError
from codecstream_export import DecoderConfig
from codecstream_parity import official


def official_decoder(config: DecoderConfig) -> Any:
    """Return an untrained ``Qwen3TTSTokenizerV2Decoder``, or skip the test that asks for it."""
    try:
        return official.official_decoder(config)
    except MissingDependencyError as error:
        if os.environ.get("CODECSTREAM_REQUIRE_OFFICIAL"):  # scripts/test installs it
            pytest.fail(str(error))
        pytest.skip(str(error))
