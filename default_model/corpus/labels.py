"""Texts with one label: sentiment, topic, and yes or no."""

from __future__ import annotations

from random import Random

from default_model.corpus import words
from default_model.corpus.dialogue import Dialogue, ask
from default_model.corpus.words import data

_SENTIMENT = (
    "Is this positive or negative? {}", "What is the sentiment? {}", "Classify the sentiment: {}",
    "Positive, negative or neutral? {}", "{} Is this positive or negative?",
    "Sentiment of this text: {}",
)  # fmt: skip
_TOPIC = (
    "What is the topic? {}", "Classify the topic: {}", "Which topic is this? {}",
    "Topic of this text: {}", "Sports, food, weather, technology or travel? {}",
)  # fmt: skip


def draw_sentiment(rng: Random) -> Dialogue:
    """Draw a text that is positive, negative or neutral."""
    kind, label = rng.choice(
        (("good", "positive"), ("bad", "negative")) * 3 + (("neutral", "neutral"),)
    )
    texts = rng.sample(words.words(kind), rng.choice((1, 1, 2)))
    return ask(rng.choice(_SENTIMENT).format(" ".join(texts)), label)


def draw_topic(rng: Random) -> Dialogue:
    """Draw a sentence of one topic."""
    label = rng.choice(list(data("words")["topics"]))
    return ask(rng.choice(_TOPIC).format(rng.choice(data("words")["topics"][label])), label)
