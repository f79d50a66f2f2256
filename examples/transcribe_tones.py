"""Transcribe generated utterances: CTC over log-mel features of variable length, through a flow.

    python -m examples.transcribe_tones --loader dpflow        (or torch)

A letter is a sound of two tones, as vowels have formants; an utterance is three to eight letters at varying speed,
pitch and loudness in noise, kept as WAV. Batches are padded in `collate`. Takes one to two minutes on two cores.
"""

import functools
import io
import wave
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from examples import flow_training
from torch_dpflow.flows import DataLoadFlow

RATE = 8_000
LETTERS = "abcdefgh"
#: Hz of each letter's two tones.
TONES = np.array(
    [(300, 900), (300, 1500), (300, 2400), (500, 1100), (500, 1900), (700, 1300), (700, 2200), (900, 2800)]
)
#: Samples of a window and between windows: 32 ms and 16 ms.
WINDOW, HOP = 256, 128
BANDS = 40

#: Padded features (samples, frames, bands), frames of each, padded letters (samples, letters), letters of each.
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def generate(variant: str, count: int) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """WAV, 16 bits, one channel; annotations have the text."""
    for number in range(count):
        rng = np.random.default_rng([flow_training.VARIANTS.index(variant), number])
        text = "".join(rng.choice(list(LETTERS), rng.integers(3, 9)))
        yield wav_bytes(speak(text, rng)), {"text": text}


def speak(text: str, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """The sound of a text, -1 to 1; short silences between letters."""
    pitch = rng.uniform(0.95, 1.05)
    parts = []
    for letter in text:
        seconds = np.arange(int(RATE * rng.uniform(0.08, 0.16))) / RATE
        waves = np.sin(2 * np.pi * pitch * np.outer(TONES[LETTERS.index(letter)], seconds))
        parts += [waves.sum(0) * np.hanning(len(seconds)), np.zeros(int(RATE * rng.uniform(0.03, 0.06)))]
    sound = np.concatenate(parts) * rng.uniform(0.1, 0.4)
    return (sound + rng.normal(0, 0.02, len(sound))).clip(-1, 1)


def wav_bytes(sound: npt.NDArray[np.float64]) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32767).astype(np.int16).tobytes())
    return data.getvalue()


def decode(data: bytes) -> torch.Tensor:
    """Samples, float32, -1 to 1."""
    with wave.open(io.BytesIO(data)) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return torch.from_numpy(frames.astype(np.float32) / 32768)


def mel_filters() -> torch.Tensor:
    """Triangles of equal width on the mel scale over the bins of the spectrum, (bins, bands)."""
    highest = 2595 * np.log10(1 + RATE / 2 / 700)
    centres = 700 * (10 ** (np.linspace(0, highest, BANDS + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (bins - centres[:-2]) / (centres[1:-1] - centres[:-2])
    falling = (centres[2:] - bins) / (centres[2:] - centres[1:-1])
    return torch.from_numpy(np.minimum(rising, falling).clip(0)).float()


class LogMel:
    """Log energies of a sound, (frames, bands)."""

    def __init__(self) -> None:
        self._window = torch.hann_window(WINDOW)
        self._filters = mel_filters()

    def __call__(self, sound: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(sound, WINDOW, HOP, window=self._window, return_complex=True)
        return (spectrum.abs().square().T @ self._filters + 1e-6).log()


def normalized(features: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over the utterance."""
    return (features - features.mean()) / features.std()


def masked(features: torch.Tensor, axis: int, widest: int) -> torch.Tensor:
    """With a random stretch of at most `widest` frames (axis 0) or bands (axis 1) set to the mean (SpecAugment)."""
    width = int(torch.randint(0, widest + 1, ()))
    first = int(torch.randint(0, features.shape[axis] - width + 1, ()))
    features = features.clone()
    features.narrow(axis, first, width).zero_()
    return features


def letters_of(target: Mapping[str, Any]) -> torch.Tensor:
    """Letters as numbers from 1; 0 is CTC's blank."""
    return torch.tensor([1 + LETTERS.index(letter) for letter in target["text"]])


def describe(flow: DataLoadFlow, variant: str) -> DataLoadFlow:
    """Waves to features and, for training, mask some of them."""
    flow.map_data("decode", decode, cache="always")
    flow.map_data("log_mel", LogMel(), cache="always")
    flow.map_data("normalization", normalized, cache="always")
    flow.map_target("letters", letters_of, cache="always")
    if variant == "train":
        flow.map_data("freq_masking", functools.partial(masked, axis=1, widest=6))
        flow.map_data("time_masking", functools.partial(masked, axis=0, widest=3))
    return flow


def padded(samples: list[Any]) -> Batch:
    features, letters = zip(*samples)
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    lengths = (torch.tensor([len(part) for part in parts]) for parts in (features, letters))
    return pad(list(features)), next(lengths), pad(list(letters)), next(lengths)


class Transcriber(nn.Module):
    """Two convolutions over time, a bidirectional GRU, and a score for each letter and blank in each frame."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU()
        )
        self.recurrence = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * width, 1 + len(LETTERS))

    def forward(self, features: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, (samples, frames, 1 + letters)."""
        hidden = self.convolutions(features.transpose(1, 2)).transpose(1, 2)
        packed = nn.utils.rnn.pack_padded_sequence(hidden, frames, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.recurrence(packed)[0], batch_first=True)
        return self.scores(hidden).log_softmax(-1)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    features, frames, letters, counts = batch
    return nn.functional.ctc_loss(model(features, frames).transpose(0, 1), letters, frames, counts)


def greedy(scores: torch.Tensor) -> list[int]:
    """The likeliest path of one utterance: repeats as one, blanks left out."""
    path = torch.unique_consecutive(scores.argmax(-1))
    return [letter for letter in path.tolist() if letter]


def edits(one: list[int], other: list[int]) -> int:
    """Fewest letters to insert, remove or replace (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (left != right))
    return row[-1]


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Wrong letters for each letter that was said."""
    wrong = said = 0
    for features, frames, letters, counts in batches:
        for scores, length, text, count in zip(model(features, frames), frames, letters, counts):
            wrong += edits(greedy(scores[:length]), text[:count].tolist())
            said += int(count)
    return {"letter_error_rate": wrong / said}


TASK = flow_training.Task(
    title="Transcribe generated utterances with CTC.",
    dataset="examples/tones",
    generate=generate,
    describe=describe,
    collate=padded,
    model=Transcriber,
    loss=loss,
    evaluate=evaluate,
    defaults={"train": 600, "val": 100, "epochs": 8, "batch_size": 16, "lr": 5e-3},
)

main = functools.partial(flow_training.main, TASK, "examples.transcribe_tones")

if __name__ == "__main__":
    raise SystemExit(main())
