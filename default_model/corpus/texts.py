"""Things to do with a given text: say it again, spell it, count or change its words."""

from __future__ import annotations

from random import Random

from default_model.corpus import words
from default_model.corpus.dialogue import Dialogue, ask


def _repeat(rng: Random) -> Dialogue:
    text = rng.choice(
        (words.sentence(rng), words.word(rng), f"{words.word(rng)} {words.word(rng)}")
    )
    form = rng.choice(
        ("Repeat after me: {}", "Say: {}", "Repeat this: {}", "Repeat: {}", "Echo: {}")
    )
    return ask(form.format(text), text)


def _spell(rng: Random) -> Dialogue:
    word = words.word(rng)
    form = rng.choice(("Spell {}.", "Spell the word {}.", "How do you spell {}?"))
    return ask(form.format(word), "-".join(word.upper()))


def _case(rng: Random) -> Dialogue:
    word = words.word(rng)
    form = rng.choice(("Write {} in capital letters.", "Put {} in upper case.", "Uppercase: {}"))
    return ask(form.format(word), word.upper())


def _first(rng: Random) -> Dialogue:
    word = words.word(rng)
    place, letter = rng.choice((("first", word[0]), ("last", word[-1])))
    return ask(
        f"What is the {place} letter of {word}?", f"The {place} letter of {word} is {letter}."
    )


def _several(rng: Random) -> Dialogue:
    given = [words.word(rng) for _ in range(rng.randint(2, 8))]
    form, answer = rng.choice((
        ("Repeat these words: {}", given), ("Say these words: {}", given),
        ("Write these words in capital letters: {}", [word.upper() for word in given]),
        ("Spell these words: {}", ["-".join(word.upper()) for word in given]),
        ("What are the first letters of these words? {}", [word[0] for word in given]),
        ("Say these words backwards: {}", given[::-1]),
    ))  # fmt: skip
    return ask(form.format(", ".join(given)), ", ".join(answer))


def _choose(rng: Random) -> Dialogue:
    items = [words.word(rng) for _ in range(rng.randint(2, 4))]
    place, item = rng.choice((("first", items[0]), ("last", items[-1])))
    return ask(f"Which word is {place}: {', '.join(items)}?", item)


def draw(rng: Random) -> Dialogue:
    """Draw one of the tasks."""
    ways = (_repeat, _repeat, _repeat, _spell, _case, _first, _choose, _several, _several)
    return rng.choice(ways)(rng)
