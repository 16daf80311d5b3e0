"""Which rows are trained on, which are held out, and which are left out: by the content of their prompts alone.

A prompt is held out by its hash, so that it is on the same side wherever, in whatever order and beside whatever other
rows it stands.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ppo_core.data.dataset import as_json
from ppo_core.data.files import given
from ppo_core.data.rows import Row
from ppo_core.spec import DatasetSpec

HALF = 8
COMPARED = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""What of a message is compared. A key that the template does not read (an id, a time) would put one prompt on both
sides; one that it reads beside these (`reasoning_content`), not compared, at most makes one prompt of two."""
HELD_OUT, REPEATED = "held out", "repeated"
"""Why a row is left out: its prompt is among the held-out ones, or stands in an earlier row already."""


@dataclass
class Sieve:
    """Says of each row where it goes; remembers the prompts it has seen."""

    fraction: float
    drop_repeats: bool
    chat: bool = False
    system_prompt: str | None = None
    held_out: set[bytes] = field(default_factory=set)
    seen: dict[str, set[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: DatasetSpec) -> Sieve:
        """As a spec has it."""
        return cls(spec.evaluation_fraction, spec.duplicates == "drop", spec.chat, spec.system_prompt)

    def forget(self) -> None:
        """Nothing was seen: the same rows come once more."""
        self.held_out.clear()
        self.seen.clear()

    def place(self, split: str, row: Row, answer: Any = None) -> tuple[str, str]:
        """The split that a row of `split` goes to, or "" and why it is left out. Held-out prompts come first.

        A repeated row has the prompt, and the `answer`, of an earlier one of its split.
        """
        if not self.fraction and not self.drop_repeats:
            return split, ""
        prompt = one_form(row.prompt, chat=self.chat, system_prompt=self.system_prompt)
        key = content_key(row.where, prompt)
        if split != "eval" and is_held_out(key, self.fraction):
            if split == "sft":
                return "", HELD_OUT
            split = "eval"
        if split != "eval" and key in self.held_out:
            return "", HELD_OUT
        if self.drop_repeats:
            whole = key if answer is None else content_key(row.where, [prompt, answer])
            seen = self.seen.setdefault(split, set())
            if whole in seen:
                return "", REPEATED
            seen.add(whole)
            if split == "eval":
                self.held_out.add(key)
        return split, ""


def one_form(prompt: Any, *, chat: bool, system_prompt: str | None = None) -> Any:
    """The prompt as it is compared with others: a text that becomes a user's message is that message, and the system
    prompt that every prompt gets is none of it, written out or not. Of messages what is COMPARED, without None.

    >>> one_form("1+1=", chat=True) == one_form([{"role": "user", "content": "1+1=", "name": None, "n": 7}], chat=False)
    True
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if chat else prompt
    messages = [
        {
            key: value if isinstance(value, str) else given(value)
            for key, value in message.items()
            if value is not None and key in COMPARED
        }
        for message in prompt
    ]
    return messages[1:] if messages[:1] == [{"role": "system", "content": system_prompt}] else messages


def content_key(where: str, content: Any) -> bytes:
    """16 bytes of the sha256 of some JSON value."""
    return hashlib.sha256(as_json(where, content, {}).encode()).digest()[:16]


def is_held_out(key: bytes, fraction: float) -> bool:
    """Whether the hash is in the first `fraction` of all hashes."""
    return int.from_bytes(key[:8], "big") < fraction * 2**64


def packed(keys: Iterable[bytes]) -> str:
    """The first half of each key, in one text: 11 characters for a prompt.

    >>> unpacked(packed([bytes(range(16))])) == {bytes(range(8))}
    True
    """
    return b64encode(b"".join(sorted(key[:HALF] for key in keys))).decode()


def unpacked(text: str) -> set[bytes]:
    """The halves of keys in a text."""
    halves = b64decode(text)
    return {halves[start : start + HALF] for start in range(0, len(halves), HALF)}
