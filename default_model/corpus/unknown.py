"""Questions that the model cannot know the answer of, and its honest answer."""

from __future__ import annotations

from random import Random

from default_model.corpus import words
from default_model.corpus.dialogue import Dialogue, ask

UNKNOWN = "I do not know that. I am a very small model."
_ASK = (
    "Who won the match between {city} and {other}?", "How many people live in {city}?",
    "Who is the mayor of {city}?", "What is the news today?",
    "What is the price of a {thing} in {city}?",
    "Who is the president of {city}?", "What is the phone number of {name}?",
    "When was {name} born?",
    "What will happen in {year}?", "What happened in {year}?", "Who invented the {thing}?",
    "What is the population of {city}?", "How do I repair a {thing}?",
    "Write an essay about the {noun}.",
    "Explain the history of the {noun}.", "Why did {name} leave {city}?",
    "Which stock should I buy?",
    "Write a program that sorts a {thing}.", "What does {name} think about the {noun}?",
    "How far is it from {city} to {other}?", "What is the meaning of life?",
    "Who is {name} {last}?",
    "Solve this equation for the {noun}.", "Translate {thing} into Latin.", "What did I eat today?",
    "Where is my {thing}?", "How old is {name}?", "What is the time?", "What day is today?",
    "What is the weather today?", "Explain quantum physics.", "Write a haiku about the {noun}.",
    "Write a Python program.", "Tell me about the {noun} in {city}.",
    "Who is the best {thing} maker?", "What is the weather in {city}?",
    "What is {many} / {few}?", "What is {many} divided by {few}?", "{many}/{few}",
    "Is {few} prime?", "What is the square root of {many}?", "What is {many} * {large}?",
    "{large}*{many}=?", "What is {few} percent of {many}?",
    "Who was {Invented}?",
    "Explain the {noun}.", "Explain {invented} mechanics",
    "Write a {adjective} function in Python.",
    "Write a Python function that counts the {thing}.", "Translate '{thing}' to German.",
    "Summarize the book about the {noun}.", "Write an email to {name}.", "How do I cook {thing}?",
    "What do you think about {name}?", "Which {thing} is the best?",
    "Fix this code: {invented}({few})",
)  # fmt: skip


def draw(rng: Random) -> Dialogue:
    """Draw a question out of reach."""
    question = rng.choice(_ASK).format(
        city=words.city(rng),
        other=words.city(rng),
        thing=rng.choice(words.words("things")),
        noun=rng.choice(words.words("nouns")),
        name=words.name(rng),
        last=words.invented(rng).capitalize(),
        invented=words.invented(rng),
        Invented=words.invented(rng).capitalize(),
        adjective=rng.choice(words.words("adjectives")),
        few=rng.randint(2, 99),
        many=rng.randint(100, 999),
        large=rng.randint(1000, 99999),
        year=rng.randint(1500, 2100),
    )
    return ask(question, UNKNOWN)
