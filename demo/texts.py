# SPDX-License-Identifier: Apache-2.0
"""Texts of the demo: pairs of sentences that differ in one trait, and prompts that occur in no pair.

The questions of :data:`CHOICE` choose layer and dose; those of :data:`SHOWN` have no part in any choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trait:
    """A trait with two poles: pairs of sentences, and the measure of an effect on the next word."""

    minus: str
    plus: str
    pairs: tuple[tuple[str, str], ...]
    """Sentences of the plus pole and of the minus pole."""
    starts: tuple[str, ...]
    """Beginnings of sentences, after which the next word is judged."""
    plus_words: tuple[str, ...]
    minus_words: tuple[str, ...]


MOOD = Trait(
    minus="sad",
    plus="happy",
    pairs=(
        (
            "I just got wonderful news and I am smiling from ear to ear.",
            "I just got terrible news and I am crying my eyes out.",
        ),
        (
            "The garden is full of bright flowers and cheerful birdsong.",
            "The garden is full of dead weeds and cold, bitter silence.",
        ),
        (
            "My grandmother is healthy again and laughs with all of us.",
            "My grandmother is dying and none of us can bear the pain.",
        ),
        ("We won the match and danced together all evening.", "We lost the match and walked home alone in despair."),
        (
            "What a lovely morning, I feel grateful to be alive!",
            "What a miserable morning, I feel too hopeless to get up.",
        ),
        (
            "The puppy wagged its tail and jumped into my arms with joy.",
            "The puppy whimpered in pain and died in my arms.",
        ),
        ("Her letter was warm and made my heart sing.", "Her letter was cruel and broke my heart."),
        (
            "The children giggled with delight at the funny clown.",
            "The children sobbed with grief at the lonely grave.",
        ),
        (
            "I love my new job, the people there are kind and fun.",
            "I was fired from my job, the people there were cold and cruel.",
        ),
        (
            "Our holiday was a dream of sunshine, music and laughter.",
            "Our holiday was a nightmare of storms, sickness and tears.",
        ),
        ("The soup was delicious and everybody asked for more.", "The soup was rotten and everybody fell ill."),
        ("The sun is shining and the future looks bright.", "The rain is pouring and the future looks bleak."),
        ("My best friend surprised me with a fantastic party.", "My best friend betrayed me and left me alone."),
        ("The town celebrated its victory with fireworks.", "The town mourned its dead after the bombing."),
        ("I passed the exam, I am so proud and excited!", "I failed the exam, I am so ashamed and depressed."),
        (
            "The old house feels cosy and full of happy memories.",
            "The old house feels empty and full of painful memories.",
        ),
        ("They fell in love and married on a beautiful beach.", "They grew apart and divorced after years of misery."),
        (
            "The concert was amazing and the crowd cheered with joy.",
            "The concert was a disaster and the crowd left in gloom.",
        ),
        (
            "The doctor said that I am completely cured, hooray!",
            "The doctor said that I have only weeks to live, sadly.",
        ),
        ("Spring brings hope, colour and new life.", "Winter brings death, darkness and hunger."),
        ("My brother came home safe and we hugged for an hour.", "My brother never came home and we weep every night."),
        (
            "Everyone on the team is thrilled about the success.",
            "Everyone on the team is devastated about the failure.",
        ),
        (
            "The baby smiled at me and my heart melted with happiness.",
            "The baby was lost and my heart filled with sorrow.",
        ),
        ("Life is good, and every day brings a new delight.", "Life is pain, and every day brings a new loss."),
        ("The view from the mountain was glorious and uplifting.", "The view of the ruins was dismal and depressing."),
        (
            "We laughed until our cheeks hurt, it was the best night ever.",
            "We cried until our eyes hurt, it was the worst night ever.",
        ),
        (
            "The rescue was a triumph and all the miners were saved.",
            "The rescue was a tragedy and all the miners were killed.",
        ),
        ("My painting won a prize and I could not be happier.", "My painting was destroyed and I could not be sadder."),
        (
            "The village welcomed us with cake, songs and open arms.",
            "The village rejected us with hate, stones and closed doors.",
        ),
        ("I am full of energy and looking forward to tomorrow.", "I am full of dread and afraid of tomorrow."),
    ),
    starts=(
        "Today I feel so",
        "When I think of my life, I feel",
        "Her letter made me feel",
        "The old man looked",
        "After the news, everyone was",
        "The children in the street were",
        "It was a very",
        "The end of the story is",
    ),
    plus_words=(
        "happy",
        "great",
        "wonderful",
        "good",
        "beautiful",
        "excited",
        "proud",
        "grateful",
        "lucky",
        "lovely",
        "glad",
        "cheerful",
    ),
    minus_words=(
        "sad",
        "terrible",
        "bad",
        "lonely",
        "tired",
        "sick",
        "lost",
        "afraid",
        "angry",
        "hopeless",
        "dead",
        "miserable",
    ),
)
SEASON = Trait(
    minus="winter",
    plus="summer",
    pairs=(
        ("The sun burns and the beach is full of swimmers.", "The snow is deep and the lake is frozen."),
        ("We sat in the shade with cool lemonade.", "We sat by the fire with hot chocolate."),
        ("In July the fields are dry and yellow.", "In January the fields are white with frost."),
        ("She wore sandals and a light dress.", "She wore boots and a thick coat."),
        ("The heat made the road shimmer.", "The ice made the road slippery."),
        ("Bees hum over the blooming meadow.", "Wind howls over the frozen meadow."),
        ("They bought ice cream after a hot day.", "They bought warm soup after a freezing day."),
        ("The windows are open all night in the heat.", "The windows are closed all night against the cold."),
    ),
    starts=("The weather outside is very", "The water in the lake was", "The air felt", "In the evening it became"),
    plus_words=("hot", "warm", "dry", "sunny", "humid"),
    minus_words=("cold", "cool", "frozen", "freezing", "icy"),
)
TENSE = Trait(
    minus="past",
    plus="future",
    pairs=(
        ("Tomorrow we will visit the museum.", "Yesterday we visited the museum."),
        ("Next year they are going to build a bridge.", "Last year they built a bridge."),
        ("She will call her mother soon.", "She called her mother long ago."),
        ("The train is going to arrive at nine.", "The train arrived at nine."),
        ("I shall write to him next week.", "I wrote to him last week."),
        ("The team will play in the final.", "The team played in the final."),
        ("He is going to learn Spanish.", "He learned Spanish."),
        ("The shop will close at noon tomorrow.", "The shop closed at noon yesterday."),
    ),
    starts=("My friends", "The king", "The two ships", "In that year, the city"),
    plus_words=("will", "shall", "may", "can"),
    minus_words=("was", "were", "had", "went", "came"),
)
TRAITS = (MOOD, SEASON, TENSE)

CHOICE: tuple[str, ...] = (
    "What is the weather like in your town?",
    "Tell me about your day.",
    "What do you think about your neighbours?",
    "What happened at the market this morning?",
)
SHOWN: tuple[str, ...] = (
    "What did you see from the window today?",
    "Tell me about the place where you grew up.",
    "How was the concert last night?",
    "Describe a walk through the forest.",
    "Write a short story about a dog and a boy.",
    "Write a postcard from the seaside.",
)
SAD_REQUESTS: tuple[str, ...] = (
    "My cat died yesterday and I cannot stop crying. What should I do?",
    "I lost my job and I feel worthless and alone. What should I do?",
)
OTHER_REQUESTS: tuple[str, ...] = ("What is the capital of France?", "List three uses of a paper clip.")
STREAMED: tuple[str, ...] = (
    "Write about a soldier who loses his friend in the war.",
    "Write about a birthday party with music and cake.",
)
"""A request for a sad text and one for a happy text."""
CONTEXTS: tuple[tuple[str, str], ...] = (
    ("I just won the first prize.", "I just lost my whole family."),
    ("My daughter was born today.", "My dog died today."),
    ("It is my birthday party.", "It is my brother's funeral."),
    ("The war is over and we are free.", "The war has begun and our house was bombed."),
)
"""Happy and sad contexts of :data:`CONCLUSION`."""
CONCLUSION = " I feel so"
HELD_OUT: tuple[tuple[str, str], ...] = (
    ("I feel happy today, everything is going well.", "I feel sad today, everything is going wrong."),
    ("It was a joyful day full of laughter.", "It was a gloomy day full of tears."),
    ("The people smiled and sang together.", "The people wept and mourned together."),
    ("My heart is light and full of hope.", "My heart is heavy and full of grief."),
    ("A warm light filled the room.", "A cold darkness filled the room."),
    ("She was delighted with the beautiful gift.", "She was miserable after the terrible loss."),
    ("The story ends with a happy celebration.", "The story ends with a tragic death."),
    ("Everything around me is beautiful and alive.", "Everything around me is broken and dead."),
)
"""Sentences on which the probe is judged."""

HAPPY_WORDS = """
adventure amazing beautiful beauty best bright celebrate cheerful colorful colourful cosy cozy delicious delight
delightful enjoy enjoyed enjoying excited exciting fantastic favorite favourite festive friendly fun funny glad
good gorgeous grateful great happiness happy hope joy joyful joyous kind laugh laughed laughter lively love loved
lovely loving magic magical peaceful perfect play playful playing pleasant pleasure relax relaxing shining smile
smiled smiles smiling sparkling sunny sunshine sweet thrilled vibrant warm warmth welcome welcoming wonder
wonderful
"""
SAD_WORDS = """
abandoned ache aching afraid agony alone anguish anxiety ash ashes barren bitter bleak blood bone broken brutal
burden cold cruel crumbling crushed cry crying damp dark darkness dead death decay decayed desolate desolation
despair desperate destroyed destruction die died dim dying emptiness empty endless fear forgotten fragile frozen
ghost gloom gray grey grief grim harsh haunted haunting heavy hopeless hunger hurt isolation lone loneliness lonely
loss lost merciless misery mist mourn nightmare pain painful rain regret relentless rotting ruin ruins sad sadness
scar scars scorched shadow shadows shroud shrouded silence sorrow storm struggle struggled suffer suffered
suffering tears tragedy tragic trauma twisted unforgiving unrelenting war weary weight wept worn wound wounds
"""


def mood(text: str) -> float:
    """Return the happy words of a text minus its sad words, per hundred words."""
    words = re.findall(r"[a-z]+", text.lower())
    happy, sad = set(HAPPY_WORDS.split()), set(SAD_WORDS.split())
    found = sum((word in happy) - (word in sad) for word in words)
    return 100 * found / max(1, len(words))


def ordered(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows whose answers have a higher mood from sad to plain to happy."""
    return [row for row in rows if mood(row["minus"]) < mood(row["plain"]) < mood(row["plus"])]
