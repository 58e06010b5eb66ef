"""Sums, differences, products, comparisons and counting with small numbers."""

from __future__ import annotations

from random import Random

from default_model.corpus.dialogue import Dialogue, ask, is_held_back

_ASK = (
    "What is {}?", "What's {}?", "Compute {}.", "How much is {}?", "Calculate {}.", "{} = ?",
    "{}=?", "{}", "Compute {}", "Can you tell me what {} is?",
)  # fmt: skip
_ASK_SEVERAL = ("Compute these:", "Calculate:", "What are these?", "Solve these, please:")
_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def _operands(rng: Random, sign: str) -> tuple[int, int]:
    top = rng.choice((10, 10, 20, 20, 50, 99))
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (max(a, b), min(a, b)) if sign == "-" else (a, b)


def result(a: int, sign: str, b: int) -> int:
    """Return a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def _asked(rng: Random, a: int, sign: str, b: int) -> tuple[str, str]:
    question = rng.choice(_ASK).format(_written(rng, a, sign, b))
    return question, f"{a} {sign} {b} = {result(a, sign, b)}"


def _written(rng: Random, a: int, sign: str, b: int) -> str:
    if rng.random() < 0.25:
        return f"{a} {_WORDS[sign]} {b}"
    shown = rng.choice("**xX×") if sign == "*" else sign
    return f"{a}{shown}{b}" if rng.random() < 0.4 else f"{a} {shown} {b}"


def draw_sum(rng: Random) -> Dialogue:
    """Draw a sum or a difference; held back by its numbers: the evaluation asks new ones."""
    sign = rng.choice("++-")
    a, b = _operands(rng, sign)
    return ask(*_asked(rng, a, sign, b), key=f"{a}{sign}{b}")


def draw_product(rng: Random) -> Dialogue:
    """Draw a product; held back by its wording: a table learnt by heart has all of its rows."""
    return ask(*_asked(rng, rng.randint(0, 12), "*", rng.randint(0, 12)))


def draw_known(rng: Random) -> Dialogue:
    """Draw a sum, a difference or a product that may be trained on."""
    while True:
        drawn = (draw_product if rng.random() < 0.4 else draw_sum)(rng)
        if not is_held_back(drawn):
            return drawn


def draw_several(rng: Random) -> Dialogue:
    """Draw several calculations to do at once, one a line."""
    solved = [draw_known(rng).answer["content"] for _ in range(rng.randint(2, 12))]
    asked = "\n".join(line.split(" = ")[0] for line in solved)
    return ask(f"{rng.choice(_ASK_SEVERAL)}\n{asked}", "\n".join(solved))


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
