"""Train the small decoder of the demo: a real codec decoder that knows three sentences by heart.

The published decoder is far too big to ship with a client, so the demo has one of the same
architecture at a fraction of the width. It is trained to give back three short clips of a
public-domain reading from their codes, and nothing else: it overfits on purpose.

There is no encoder either. The codes of a clip come from a residual k-means over its
log-mel features, which is enough to give them the structure that a codec's have: 16 levels,
each refining what the levels before it left over.

    python scripts/train_demo_decoder.py --clips DIR --out DIR [--steps N] [--seed S] [--resume]

``DIR`` of ``--clips`` is the ``librivox`` folder of Debian's ``pocketsphinx-testdata``. Setting
``MALLOC_MMAP_THRESHOLD_`` and ``MALLOC_TRIM_THRESHOLD_`` to 1000000000 in the environment keeps
glibc from giving large blocks back to the system between steps and saves a third of the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from codecstream_export.checkpoint import load_checkpoint, save_checkpoint
from codecstream_export.config import DecoderConfig
from codecstream_export.eager import Codebook, ConvNeXtBlock, EagerDecoder
from codecstream_parity import snr_db
from codecstream_parity.listening import heard_words, word_errors

CLIP_NAMES = tuple(
    f"sense_and_sensibility_01_austen_64kb-{number}" for number in ("0880", "0890", "0930")
)
SOURCE = (
    "LibriVox reading of Jane Austen's Sense and Sensibility, chapter 1 (public domain); "
    "{name}.wav of Debian's pocketsphinx-testdata"
)

CONFIG = DecoderConfig(
    codebook_dim=32,
    latent_dim=96,
    hidden_size=96,
    intermediate_size=192,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=32,
    num_hidden_layers=2,
    decoder_dim=192,
    layer_scale_initial_scale=0.3,
)
"""1.7 million parameters: weights, their ONNX export and the codes stay under 12 MB in all."""

SAMPLE_RATE_HZ = CONFIG.geometry.sample_rate_hz

MEL_BANDS = 40
MEL_FFT = 1024
MEL_HOPS_PER_FRAME = 4
CLUSTERS = 16
KMEANS_ITERATIONS = 30

LEARNING_RATE = 2e-3
ADAM_BETAS = (0.8, 0.95)
WARM_UP_STEPS = 100
GRADIENT_NORM_MAX = 1.0
STFT_SIZES = (256, 512, 1024, 2048)
STFT_LOG_FLOOR = 1e-2  # about 40 dB under the average speech bin: no effort goes into silence
LOG_MAGNITUDE_WEIGHT = 0.5
WAVEFORM_WEIGHT = 10.0
BRANCH_GAIN = 0.3  # start value of the residual branches' scales, see build_decoder()
UNUSED_ENTRY_GAIN = 0.1
EVALUATE_EVERY = 200

FloatArray = NDArray[np.float32]
console = Console(log_path=False)


@dataclass(frozen=True, slots=True)
class Clip:
    """One sentence: what is said, how it sounds at the codec's rate, and its codes."""

    name: str
    words: tuple[str, ...]
    audio: FloatArray  # [frames * 1920], in [-1, 1]
    codes: NDArray[np.int16]  # [frames, codebooks]

    @property
    def sentence(self) -> str:
        return " ".join(self.words).capitalize() + "."


# Clips and codes


def read_transcripts(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the words of every clip in a CMU Sphinx transcription file."""
    line_format = re.compile(r"<s> (?P<words>.*) </s> \((?P<name>.*)\)")
    matches = map(line_format.fullmatch, path.read_text(encoding="utf-8").splitlines())
    return {m["name"]: tuple(m["words"].split()) for m in matches if m}


def read_audio(path: Path) -> FloatArray:
    """Return a mono file at the codec's rate, cut to whole frames."""
    samples, rate_hz = soundfile.read(path, dtype="float32")
    samples = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)
    whole = len(samples) - len(samples) % CONFIG.samples_per_frame
    return np.asarray(samples[:whole], np.float32)


def read_clips(folder: Path, seed: int) -> list[Clip]:
    """Read the clips and make their codes."""
    transcripts = read_transcripts(folder / "transcription")
    audios = [read_audio(folder / f"{name}.wav") for name in CLIP_NAMES]
    features = [frame_features(audio) for audio in audios]
    codes = residual_kmeans(np.concatenate(features), np.random.default_rng(seed))
    ends = np.cumsum([len(frames) for frames in features])
    return [
        Clip(name, transcripts[name], audio, clip_codes)
        for name, audio, clip_codes in zip(
            CLIP_NAMES, audios, np.split(codes, ends[:-1]), strict=True
        )
    ]


def mel_filters() -> Tensor:
    """Return triangular filters ``[MEL_BANDS, MEL_FFT // 2 + 1]``, evenly spaced in mel."""
    top_mel = 2595 * math.log10(1 + SAMPLE_RATE_HZ / 2 / 700)
    corners_hz = 700 * (10 ** (torch.linspace(0, top_mel, MEL_BANDS + 2) / 2595) - 1)
    bins_hz = torch.linspace(0, SAMPLE_RATE_HZ / 2, MEL_FFT // 2 + 1)
    low, centre, high = (corners_hz[i : i + MEL_BANDS, None] for i in range(3))
    rising = (bins_hz - low) / (centre - low)
    falling = (high - bins_hz) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0)


def frame_features(audio: FloatArray) -> NDArray[np.float64]:
    """Return log-mel features, one row per codec frame, of all its hops side by side."""
    hop = CONFIG.samples_per_frame // MEL_HOPS_PER_FRAME
    frames = len(audio) // CONFIG.samples_per_frame
    magnitude = stft_magnitude(torch.from_numpy(audio), MEL_FFT, hop)
    log_mel = (mel_filters() @ magnitude + 1e-3).log()[:, : frames * MEL_HOPS_PER_FRAME]
    return log_mel.T.reshape(frames, -1).double().numpy()


def residual_kmeans(features: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int16]:
    """Quantise rows of features, level by level; return codes ``[rows, codebooks]``.

    A level has a few dozen clusters, far fewer than the codebook has entries. Their numbers are
    spread over the whole codebook so that the codes look like, and test like, a codec's.
    """
    residual = (features - features.mean(0)) / features.std(0)
    codes = np.empty((len(features), CONFIG.num_quantizers), np.int16)
    for level in range(CONFIG.num_quantizers):
        centres, nearest = kmeans(residual, rng)
        entries = rng.choice(CONFIG.codebook_size, CLUSTERS, replace=False)
        codes[:, level] = entries[nearest]
        residual = residual - centres[nearest]
    return codes


def kmeans(
    points: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return cluster centres and the nearest one of every point."""
    centres = points[rng.choice(len(points), CLUSTERS, replace=False)]
    for _ in range(KMEANS_ITERATIONS):
        nearest = np.square(points[:, None] - centres).sum(-1).argmin(1)
        for cluster in np.unique(nearest):  # a cluster that lost all its points stays put
            centres[cluster] = points[nearest == cluster].mean(0)
    nearest = np.square(points[:, None] - centres).sum(-1).argmin(1)
    return centres, nearest


# Training


def build_decoder(clips: Sequence[Clip]) -> EagerDecoder:
    """Return an untrained decoder that is fit for training from scratch.

    The published start values of the residual branches, 0.01 and 1e-6, are for long trainings:
    with them the transformer and the ConvNeXt blocks would hardly take part in this short one.
    """
    decoder = EagerDecoder(CONFIG)
    used = np.concatenate([clip.codes for clip in clips])
    with torch.no_grad():
        for module in decoder.modules():
            if isinstance(module, ConvNeXtBlock):
                module.gamma.fill_(BRANCH_GAIN)
        codebooks = [module for module in decoder.modules() if isinstance(module, Codebook)]
        for level, codebook in enumerate(codebooks):
            entries = torch.randn_like(codebook.embedding_sum)
            unused = np.setdiff1d(np.arange(CONFIG.codebook_size), used[:, level])
            entries[unused] *= UNUSED_ENTRY_GAIN  # never trained, but not silent either
            codebook.embedding_sum.copy_(entries)
            codebook.cluster_usage.requires_grad_(False)
    return decoder


def stft_magnitude(audio: Tensor, size: int, hop: int) -> Tensor:
    window = torch.hann_window(size)
    spectrum = torch.stft(audio, size, hop, window=window, return_complex=True)
    # The gradient of a square root is infinite at zero.
    return torch.view_as_real(spectrum).square().sum(-1).clamp(min=1e-12).sqrt()


def training_loss(decoded: Tensor, clip: Tensor) -> Tensor:
    """Compare magnitudes at several resolutions, and the waveform itself.

    The magnitudes get the decoder going, when it has no phase to speak of; the waveform is what
    it is asked for in the end.
    """
    loss = WAVEFORM_WEIGHT * (decoded - clip).abs().mean()
    for size in STFT_SIZES:
        mine, wanted = (stft_magnitude(x, size, size // 4) for x in (decoded, clip))
        convergence = torch.linalg.norm(mine - wanted) / torch.linalg.norm(wanted)
        logs = ((mine + STFT_LOG_FLOOR).log() - (wanted + STFT_LOG_FLOOR).log()).abs().mean()
        loss = loss + (convergence + LOG_MAGNITUDE_WEIGHT * logs) / len(STFT_SIZES)
    return loss


def learning_rate_factor(step: int, steps: int) -> float:
    """A short linear warm-up, then half a cosine down to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * step / steps)


class Trainer:
    """The decoder with its optimiser; a step is one whole clip, as the demo will decode it."""

    def __init__(self, clips: Sequence[Clip], steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.clips = clips
        self.steps = steps
        self.step = 0
        self.best_snr_db = -math.inf
        self.decoder = build_decoder(clips)
        trained = [p for p in self.decoder.parameters() if p.requires_grad]
        self.optimiser = torch.optim.Adam(trained, lr=LEARNING_RATE, betas=ADAM_BETAS)
        self.rng = np.random.default_rng(seed)
        frames = np.array([len(clip.codes) for clip in clips])
        self.clip_odds = frames / frames.sum()

    def train_step(self) -> float:
        """Take one step and return its loss."""
        clip = self.clips[self.rng.choice(len(self.clips), p=self.clip_odds)]
        for group in self.optimiser.param_groups:
            group["lr"] = LEARNING_RATE * learning_rate_factor(self.step, self.steps)
        decoded = self.decoder(codes_tensor(clip))[0]
        loss = training_loss(decoded, torch.from_numpy(clip.audio))
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), GRADIENT_NORM_MAX)
        self.optimiser.step()
        self.step += 1
        return loss.item()

    def run(self, out: Path, state: Path) -> None:
        """Train to the last step, with the best decoder so far in ``out`` at all times."""
        losses: list[float] = []
        with console.status("training") as status:
            while self.step < self.steps:
                losses.append(self.train_step())
                status.update(f"step {self.step} of {self.steps}, loss {losses[-1]:.3f}")
                if self.step % EVALUATE_EVERY == 0 or self.step == self.steps:
                    self.evaluate_and_keep(out, float(np.mean(losses)))
                    self.save(state)
                    losses.clear()

    def evaluate_and_keep(self, out: Path, mean_loss: float) -> None:
        """Print how it goes; write the checkpoint if its worst clip is better than ever."""
        rounded = rounded_to_float16(self.decoder)
        snrs_db = [snr_db(clip.audio, decode(rounded, clip)) for clip in self.clips]
        shown = " ".join(f"{snr:5.1f}" for snr in snrs_db)
        console.log(f"step {self.step:5d}  loss {mean_loss:.3f}  SNR {shown} dB")
        if min(snrs_db) > self.best_snr_db:
            self.best_snr_db = min(snrs_db)
            save_checkpoint(out / "checkpoint", self.decoder, dtype=torch.float16)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "step": self.step,
                "best_snr_db": self.best_snr_db,
                "decoder": self.decoder.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "rng": self.rng.bit_generator.state,
            },
            path,
        )

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.best_snr_db = state["best_snr_db"]
        self.decoder.load_state_dict(state["decoder"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.rng.bit_generator.state = state["rng"]


# Evaluation


def codes_tensor(clip: Clip) -> Tensor:
    """Return the codes as the decoder takes them, int64 ``[1, codebooks, frames]``."""
    return torch.from_numpy(clip.codes.T.astype(np.int64))[None]


def rounded_to_float16(decoder: EagerDecoder) -> EagerDecoder:
    """Return what a float16 checkpoint of the decoder would load as."""
    return copy.deepcopy(decoder).half().float()


@torch.no_grad()
def decode(decoder: EagerDecoder, clip: Clip) -> FloatArray:
    decoded: FloatArray = decoder(codes_tensor(clip))[0].numpy()
    return decoded


def print_report(clips: Sequence[Clip], decoder: EagerDecoder) -> None:
    """Print the table of what a stored decoder makes of the clips."""
    table = Table(
        Column("clip", overflow="fold"),
        *("frames", "SNR dB", "words", "errors, clip", "errors, decoded"),
    )
    for clip in clips:
        decoded = decode(decoder, clip)
        table.add_row(
            clip.name,
            str(len(clip.codes)),
            f"{snr_db(clip.audio, decoded):.1f}",
            str(len(clip.words)),
            str(word_errors(clip.words, heard_words(clip.audio))),
            str(word_errors(clip.words, heard_words(decoded))),
        )
    console.print(table)


# Output


def write_utterances(clips: Sequence[Clip], out: Path) -> None:
    """Write the codes of every clip and the list of what they say."""
    (out / "codes").mkdir(parents=True, exist_ok=True)
    utterances = []
    for clip in clips:
        codes_name = f"codes/{clip.name}.npy"
        np.save(out / codes_name, clip.codes)
        utterances.append(
            {
                "name": clip.name,
                "text": clip.sentence,
                "codes": codes_name,
                "source": SOURCE.format(name=clip.name),
            }
        )
    document = json.dumps(utterances, indent=2) + "\n"
    (out / "utterances.json").write_text(document, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the small decoder of the demo.")
    parser.add_argument("--clips", type=Path, required=True, help="folder of the LibriVox clips")
    parser.add_argument("--out", type=Path, required=True, help="folder that the demo reads")
    parser.add_argument("--steps", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path("demo-training.pt"),
        help="where the state of the training is kept (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the state")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.use_deterministic_algorithms(True)
    clips = read_clips(arguments.clips, arguments.seed)
    write_utterances(clips, arguments.out)
    trainer = Trainer(clips, arguments.steps, arguments.seed)
    if arguments.resume:
        trainer.load(arguments.state)
    parameters = sum(p.numel() for p in trainer.decoder.parameters())
    console.log(f"{len(clips)} clips, {parameters:,} parameters")
    trainer.run(arguments.out, arguments.state)
    print_report(clips, load_checkpoint(arguments.out / "checkpoint").decoder)


if __name__ == "__main__":
    main()
