"""The prompts of the golden file: our own texts, chosen for variety and for lengths around the KV block size (16).

Three kinds: `text` (tokenised as it is), `chat` (through the model's chat template) and `ids` (token ids as given).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PASSAGE = """\
The mill at the bend of the river had not ground any flour for thirty years when Marta bought it. The roof let \
in the rain, swallows nested in the gearing, and the great wheel was held in place by nothing but ivy and habit. \
Her brother, who was an engineer and therefore a pessimist, walked around it twice and said that the cheapest \
repair would be a box of matches. Marta said that she had not asked for the cheapest repair. She wanted to hear \
it turn.

They began with the water. The old channel was full of silt and bicycles, and it took the whole of April to dig \
it out by hand. In May they found that the sluice gate, which everybody had assumed to be lost, was lying under \
a hedge, perfectly sound, and in use as a bridge for hens. In June the carpenter came. He was a quiet man who \
measured everything three times and wrote the numbers on the wall with a pencil, so that by the end of summer \
the whole north side of the mill was covered with columns of figures, like the inside of a banker's head. The \
village came to look at them. Some people claimed to understand the order in which they had been written, and a \
retired schoolteacher found a mistake in the seventh column, which the carpenter corrected without a word.

The stones were the last problem. A millstone has to be dressed: the furrows that carry the grain outwards must \
be cut again whenever they wear down, and the people who know how to do it are fewer every year. The one they \
found was eighty-one years old and lived two valleys away. He refused to travel by car, so the stones travelled \
to him, on a cart behind a tractor, at the speed of a funeral. He worked for nine days, drank a great deal of \
tea, and told Marta that a good stone sings when the furrows are right. She thought that this was a figure of \
speech until she heard it.

On the first Saturday of October they opened the sluice. Nothing happened for a moment, except that the hens, \
who had lost their bridge, stood on the bank and complained. Then the wheel groaned, shook off a few yards of \
ivy, and moved by the width of a hand. It stopped. Her brother looked at his shoes. It moved again, and went on \
moving, slowly at first and then with a steady, heavy certainty, and deep inside the building the shafts took up \
the load one after another, and the stones began to sing. The schoolteacher wept openly. The carpenter wrote one \
last number on the wall, the time, and put the pencil behind his ear."""

TEXTS = {
    "one_token": "Hello",
    "capital": "The capital of France is",
    "once": "Once upon a time, in a village between two mountains, there lived a clockmaker who",
    "list": "Here are five things to check before a long bicycle trip:\n1.",
    "repetition": "one two three one two three one two three one two",
    "letters": "A B C D E F G H I J K L",
    "question": "Q: Why is the sky blue?\nA:",
    "recipe": "Recipe for potato soup\n\nIngredients:\n- 6 potatoes\n- 1 onion\n-",
    "letter": "Dear Ms Okafor,\n\nThank you for your letter of 3 March about the broken boiler. I am sorry to",
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19,",
    "arithmetic": "12 + 7 = 19\n25 + 8 = 33\n41 + 16 =",
    "spaces": "   leading spaces,   inner   gaps, and a trailing one ",
    "newlines": "\n\n\nChapter One\n\n\n",
    "upper": "WARNING: DO NOT OPEN THIS DOOR WHILE THE TRAIN IS",
    "facts": "Water boils at 100 degrees Celsius at sea level. At the top of a high mountain it boils at",
    "dialogue": '"You are late," said the gardener.\n"The train was late," said the driver, "and I was on it."\n"',
    "poem": "The harbour sleeps, the lanterns sway,\nThe tide has taken the light away,\n",
    "chinese": "春天来了，院子里的桃花都开了。孩子们在树下",
    "japanese": "昨日、友達と一緒に図書館へ行きました。そこで",
    "korean": "서울의 겨울은 춥지만 눈이 오면",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy. Babička v kuchyni pekla koláče a dědeček",
    "arabic": "في يوم من الأيام كان هناك تاجر يعيش في مدينة بغداد وكان",
    "hindi": "एक समय की बात है, एक छोटे से गाँव में एक किसान रहता था।",
    "russian": "Поезд пришёл на станцию рано утром, и на платформе никого не было, кроме",
    "greek": "Η θάλασσα ήταν ήρεμη και ο ψαράς",
    "french": "Le vieux pont de pierre, construit au treizième siècle, relie",
    "german": "Die Straßenbahn fährt über die Brücke, während die Möwen",
    "emoji": "My week in emoji: Monday 😴, Tuesday 🏃‍♀️, Wednesday 🍝, Thursday 🌧️☔, Friday 🎉👨‍👩‍👧, Saturday",
    "symbols": "∀x ∈ ℝ: x² ≥ 0, ∑ᵢ aᵢ ≤ ∞, π ≈ 3.14159 — “quoted” … and",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n'
    "    if n < 2:\n        return n\n",
    "javascript": "// Debounce a function\nfunction debounce(fn, delayMs) {\n"
    "  let timer = null;\n  return function (...args) {\n",
    "sql": "SELECT customer_id, COUNT(*) AS num_orders\nFROM orders\nWHERE placed_at >= '2024-01-01'\nGROUP BY",
    "json": '{"name": "Marta", "age": 52, "address": {"street": "Mill Lane", "number": 7}, "hobbies": ["',
    "html": '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <title>Opening hours</title>\n</head>\n<body>\n',
    "shell": "#!/bin/sh\nset -eu\n# Remove log files that are older than a week\nfind /var/log/app",
    "rust": 'fn main() {\n    let words = vec!["river", "stone", "wheel"];\n'
    "    for (i, word) in words.iter().enumerate() {\n",
    "csv": "date,station,temp_c,wind_ms\n2023-05-01,Brno,14.2,3.1\n2023-05-02,Brno,15.8,2.4\n2023-05-03,Brno,",
}

CHATS: dict[str, list[tuple[str, str]]] = {
    "hi": [("user", "hi")],
    "gravity": [("user", "What is gravity? Explain it to a ten year old.")],
    "haiku": [("user", "Write a haiku about a railway station at night.")],
    "plan": [("user", "I have two hours in Vienna between trains. What should I see?")],
    "rewrite": [("user", "Rewrite this sentence so that it is polite: Send me the report now.")],
    "code": [
        ("user", "Write a Python function that checks whether a string is a palindrome, ignoring spaces and case.")
    ],
    "bug": [
        (
            "user",
            "Why does this print 10 ten times?\n\nfor (var i = 0; i < 10; i++) { setTimeout(() => console.log(i)); }",
        )
    ],
    "system_pirate": [("system", "You are a pirate. Answer in one sentence."), ("user", "How is the weather today?")],
    "system_empty": [("system", ""), ("user", "Name three primary colours.")],
    "translate": [("user", "Translate to Czech: Good morning, where is the nearest bakery?")],
    "chinese": [("user", "请用一句话介绍北京。")],
    "arabic": [("user", "ما هي عاصمة مصر؟")],
    "hindi": [("user", "भारत की राजधानी क्या है?")],
    "emoji": [("user", "Repeat exactly: 🔥🌶️👨‍👩‍👧 ďábelské 你好")],
    "two_turns": [
        ("user", "My name is Tomáš and I keep bees."),
        ("assistant", "Nice to meet you, Tomáš! How many hives do you have?"),
        ("user", "Four. What is my name, and what should I do for the bees in autumn?"),
    ],
    "three_turns": [
        ("system", "You are a careful arithmetic tutor."),
        ("user", "What is 17 * 3?"),
        ("assistant", "17 * 3 = 51."),
        ("user", "And plus 9?"),
        ("assistant", "51 + 9 = 60."),
        ("user", "Now divide it by 5 and explain each step."),
    ],
    "table": [("user", "Make a table of the four seasons with a typical month and a typical fruit for each.")],
    "whitespace": [("user", "  \n  What does a lone newline mean in Markdown?\n\n")],
}

# Name, length in tokens: the first token is in a block of its own, a block is just full, one more, two blocks, ...
EXACT_LENGTHS = {f"exact_{length}": length for length in (2, 15, 16, 17, 31, 32, 33, 48, 300, 450)}


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """One prompt. Exactly one of text, messages and ids is set; kind says which."""

    name: str
    kind: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    ids: tuple[int, ...] | None = None


def ship_log(num_days: int) -> str:
    """A long text by rule: the log of a ship, one entry a day, about 25 tokens each."""
    winds = ("north", "north-west", "south", "east", "south-west", "west", "north-east")
    seas = ("calm", "rough", "moderate", "slight")
    events = (
        "saw two whales",
        "mended the foresail",
        "passed a fishing fleet",
        "caught rain in the barrels",
        "lost an anchor",
    )
    days = range(1, num_days + 1)
    lines = [
        f"Day {i}. Wind {winds[i % 7]}, sea {seas[i % 4]}. Sailed {60 + i * 37 % 90} miles and {events[i % 5]}."
        for i in days
    ]
    return "\n".join(lines) + f"\nDay {num_days + 1}."


def random_ids(seed: int, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(vocab_size) for _ in range(length))


def all_prompts(vocab_size: int, cut_to_tokens: Callable[[str, int], str]) -> list[GoldenPrompt]:
    """Every golden prompt; cut_to_tokens(text, n) returns the prefix of text that is exactly n tokens long."""
    prompts = [GoldenPrompt(f"text/{name}", "text", text=text) for name, text in TEXTS.items()]
    for name, length in EXACT_LENGTHS.items():
        prompts.append(GoldenPrompt(f"text/{name}", "text", text=cut_to_tokens(PASSAGE, length)))
    prompts.append(GoldenPrompt("text/exact_600", "text", text=cut_to_tokens(ship_log(63), 600)))
    prompts.append(GoldenPrompt("text/long_log", "text", text=ship_log(63)))
    prompts += [GoldenPrompt(f"chat/{name}", "chat", messages=tuple(turns)) for name, turns in CHATS.items()]
    question = "\n\nSummarise this story in two sentences."
    prompts.append(GoldenPrompt("chat/summary", "chat", messages=(("user", PASSAGE + question),)))
    for length in (1, 16, 40, 129, 257):
        prompts.append(GoldenPrompt(f"ids/random_{length}", "ids", ids=random_ids(length, length, vocab_size)))
    prompts.append(GoldenPrompt("ids/repeated_64", "ids", ids=(338,) * 64))
    return prompts
