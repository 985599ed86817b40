"""The values that dialogues are about: names, numbers, words. Each is either for training or held out. Floor 7."""
from __future__ import annotations

import random
import zlib

from refengine.recall.phrases import PHRASE_WORDS

_ONSETS = ("b br c ch cl d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn sp st t th tr v w y z").split()
_VOWELS = "a e i o u a e i o u ai ea ee oo ou ia io ö é ü".split()
_CODAS = ["", "", "", *"b ck d f g k l ll m n nd ng nt p r rd rk rn s sh ss st t th v x z".split()]
_WORDS = {
    "name": """Ada Ben Cleo Dan Emma Finn Grace Hugo Iris Jack Kate Leo Mia Nora Oscar Paul Rosa Sam Tara Uma
    Victor Wendy Yara Zoe Anna Boris Carla David Elena Frank Greta Henry Ivan Julia Karl Laura Marco
    Nina Otto Peter Rita Simon Tina Vera Alice Bob Charlie Max Bella Luna Rex Milo Buddy Rocky Daisy
    Coco Oliver Tom Maria John Sarah James Lisa Eva Omar Ali Chen Yuki Ravi Priya Olga""",
    "place": """Paris London Rome Berlin Madrid Oslo Tokyo Cairo Lima Vienna Prague Dublin Athens Boston Chicago
    Sydney Toronto Delhi Lisbon Warsaw Zurich Geneva Lyon Munich Hamburg Naples Kyoto Seoul Havana
    Nairobi Denver Austin Dallas Porto Bergen Malmo""",
    "colour": """red blue green yellow black white grey brown pink purple orange silver golden violet turquoise beige
    crimson indigo scarlet olive""",
    "food": """pizza soup rice bread pasta salad sushi curry cake cheese pancakes stew porridge lasagna tacos
    noodles pie toast dumplings omelette couscous risotto chocolate honey""",
    "drink": "tea coffee milk water juice cocoa lemonade cider beer wine mead cola ginger espresso",
    "animal": """dog cat horse owl fox wolf bear otter tiger lion panda rabbit badger eagle whale dolphin penguin
    hedgehog goat donkey spider turtle crow heron""",
    "hobby": """chess football tennis painting reading sailing climbing cooking dancing singing running fishing
    knitting gardening cycling swimming poker drawing skiing hiking""",
    "item": """apples bread milk eggs butter cheese nails soap rope candles matches socks paper pens salt sugar
    rice tea coffee batteries tape towels shoes gloves hat map knife lamp tent boots oil flour onions
    carrots potatoes lemons pears grapes beans tomatoes garlic pepper honey jam yoghurt fish chicken
    noodles cereal water juice stamps string glue paint brushes bulbs toothpaste shampoo blanket pillow
    camera charger passport tickets sunscreen umbrella book scissors needles thread ribbon""",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}
_WORDS = {kind: words.split() for kind, words in _WORDS.items()}


def is_held_out(value: str) -> bool:
    """Whether a value is kept out of training: a fifth of all texts, by their CRC-32. Training never shows one of them."""
    return zlib.crc32(value.lower().encode()) % 5 == 0


# What blends are made of. The words of the phrases are among them on both sides: a piece that a model has only ever seen in
# its own sentences is one that it cannot copy.
_PIECES = {side: [*PHRASE_WORDS, *(word.lower() for words in _WORDS.values() for word in words if is_held_out(word) == side)]
           for side in (False, True)}


class Values:
    """Draws values that differ from each other. held_out: only such values, else none of them. lower: in lower case."""

    def __init__(self, rng: random.Random, *, held_out: bool, lower: bool):
        self.rng, self.held_out, self.lower, self._taken = rng, held_out, lower, set()

    def draw(self, kind: str) -> str:
        """A value of a kind: "name", "place", "number", "age", "time" or one of the kinds of words."""
        while True:
            value = self._any(kind)
            if value.lower() not in self._taken and is_held_out(value) == self.held_out:
                self._taken.add(value.lower())
                return value.lower() if self.lower else value

    def _any(self, kind: str) -> str:
        rng = self.rng
        if kind == "number":
            return "".join(rng.choices("0123456789", k=rng.choice((2, 3, 4, 4, 4, 5, 6))))
        if kind == "age":
            return str(rng.randint(2, 99))
        if kind == "time":
            return f"{rng.randint(1, 12)}:{rng.choice((0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55)):02}"
        # NOTE: few real ones. What comes from a short list can be told from its first letters, and need not be copied.
        real = rng.random() < 0.3
        word = rng.choice(_WORDS[kind]) if real else self._blend() if rng.random() < 0.5 else self._made_up()
        return word.capitalize() if kind in ("name", "place") else word

    def _blend(self) -> str:
        """The beginning of one word and the end of another."""
        one, other = (self.rng.choice(_PIECES[self.held_out]) for _ in range(2))
        word = one[:self.rng.randint(1, len(one) - 1)] + other[self.rng.randint(1, len(other) - 1):]
        return word if len(word) > 2 else one + other

    def _made_up(self) -> str:
        syllables = self.rng.choice((1, 2, 2, 2, 3))
        word = "".join(self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) for _ in range(syllables))
        word += self.rng.choice(_CODAS)
        return word if len(word) > 2 else word + self.rng.choice("klmnrst")
