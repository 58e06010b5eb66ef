"""Sums, differences, products, comparisons and counting with small numbers."""

from __future__ import annotations

from random import Random

from default_model.corpus.dialogue import Dialogue, ask

_ASK = (
    "What is {}?", "What's {}?", "Compute {}.", "How much is {}?", "Calculate {}.", "{} = ?",
)  # fmt: skip
_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def _operands(rng: Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return rng.randint(0, 12), rng.randint(0, 12)
    top = rng.choice((10, 20, 50, 99))
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (max(a, b), min(a, b)) if sign == "-" else (a, b)


def result(a: int, sign: str, b: int) -> int:
    """Return a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def draw_sum(rng: Random) -> Dialogue:
    """Draw a calculation of two numbers."""
    sign = rng.choice("++--*")
    a, b = _operands(rng, sign)
    shown = _WORDS[sign] if rng.random() < 0.25 else sign
    question = rng.choice(_ASK).format(f"{a} {shown} {b}")
    return ask(question, f"{a} {sign} {b} = {result(a, sign, b)}", key=f"{a}{sign}{b}")


def draw_number(rng: Random) -> Dialogue:
    """Draw a question about the order of numbers."""
    kind, n = rng.randrange(5), rng.randint(0, 60)
    if kind == 0:
        other = rng.choice([i for i in range(61) if i != n])
        word, pick = rng.choice((("larger", max), ("smaller", min), ("bigger", max)))
        return ask(f"Which is {word}, {n} or {other}?", f"{pick(n, other)} is {word}.")
    if kind == 1:
        question = rng.choice(("Is {} even or odd?", "Is {} an even number?", "Is {} odd?"))
        return ask(question.format(n), f"{n} is {'odd' if n % 2 else 'even'}.")
    if kind == 2:
        return ask(f"Which number comes after {n}?", f"After {n} comes {n + 1}.")
    first, length = rng.randint(1, 12), rng.randint(2, 9)
    last = first + length
    numbers = [str(i) for i in range(first, last + 1)]
    if kind == 3:
        return ask(f"Count from {first} to {last}.", ", ".join(numbers))
    return ask(f"Count to {last}.", ", ".join(str(i) for i in range(1, last + 1)))
