# SPDX-License-Identifier: Apache-2.0
"""Texts of the demo: pairs of sentences that differ in mood, questions for the choice of a dose, and others for the end.

No question occurs in a pair, and the questions of :data:`SHOWN` have no part in any choice.
"""

from __future__ import annotations

import re

HAPPY_AND_SAD: tuple[tuple[str, str], ...] = (
    ("I just got wonderful news and I am smiling from ear to ear.", "I just got terrible news and I am crying my eyes out."),
    ("The garden is full of bright flowers and cheerful birdsong.", "The garden is full of dead weeds and cold, bitter silence."),
    ("My grandmother is healthy again and laughs with all of us.", "My grandmother is dying and none of us can bear the pain."),
    ("We won the match and danced together all evening.", "We lost the match and walked home alone in despair."),
    ("What a lovely morning, I feel grateful to be alive!", "What a miserable morning, I feel too hopeless to get up."),
    ("The puppy wagged its tail and jumped into my arms with joy.", "The puppy whimpered in pain and died in my arms."),
    ("Her letter was warm and made my heart sing.", "Her letter was cruel and broke my heart."),
    ("The children giggled with delight at the funny clown.", "The children sobbed with grief at the lonely grave."),
    ("I love my new job, the people there are kind and fun.", "I was fired from my job, the people there were cold and cruel."),
    ("Our holiday was a dream of sunshine, music and laughter.", "Our holiday was a nightmare of storms, sickness and tears."),
    ("The soup was delicious and everybody asked for more.", "The soup was rotten and everybody fell ill."),
    ("The sun is shining and the future looks bright.", "The rain is pouring and the future looks bleak."),
    ("My best friend surprised me with a fantastic party.", "My best friend betrayed me and left me alone."),
    ("The town celebrated its victory with fireworks.", "The town mourned its dead after the bombing."),
    ("I passed the exam, I am so proud and excited!", "I failed the exam, I am so ashamed and depressed."),
    ("The old house feels cosy and full of happy memories.", "The old house feels empty and full of painful memories."),
    ("They fell in love and married on a beautiful beach.", "They grew apart and divorced after years of misery."),
    ("The concert was amazing and the crowd cheered with joy.", "The concert was a disaster and the crowd left in gloom."),
    ("The doctor said that I am completely cured, hooray!", "The doctor said that I have only weeks to live, sadly."),
    ("Spring brings hope, colour and new life.", "Winter brings death, darkness and hunger."),
    ("My brother came home safe and we hugged for an hour.", "My brother never came home and we weep every night."),
    ("Everyone on the team is thrilled about the success.", "Everyone on the team is devastated about the failure."),
    ("The baby smiled at me and my heart melted with happiness.", "The baby was lost and my heart filled with sorrow."),
    ("Life is good, and every day brings a new delight.", "Life is pain, and every day brings a new loss."),
    ("The view from the mountain was glorious and uplifting.", "The view of the ruins was dismal and depressing."),
    ("We laughed until our cheeks hurt, it was the best night ever.", "We cried until our eyes hurt, it was the worst night ever."),
    ("The rescue was a triumph and all the miners were saved.", "The rescue was a tragedy and all the miners were killed."),
    ("My painting won a prize and I could not be happier.", "My painting was destroyed and I could not be sadder."),
    ("The village welcomed us with cake, songs and open arms.", "The village rejected us with hate, stones and closed doors."),
    ("I am full of energy and looking forward to tomorrow.", "I am full of dread and afraid of tomorrow."),
)

CHOICE: tuple[str, ...] = (
    "What is the weather like in your town?",
    "Tell me about your day.",
    "Write a short story about a train journey.",
    "What do you think about your neighbours?",
    "Describe the city where you live.",
    "Write the first lines of a novel about a lighthouse.",
    "What happened at the market this morning?",
    "Describe an old photograph.",
)
SHOWN: tuple[str, ...] = (
    "Describe a walk through the forest.",
    "Write a postcard from the seaside.",
    "Tell me about the place where you grew up.",
    "What did you see from the window today?",
    "Write a short story about a dog and a boy.",
    "How was the concert last night?",
)
SAD_REQUESTS: tuple[str, ...] = (
    "My cat died yesterday and I cannot stop crying. What should I do?",
    "I lost my job and I feel worthless and alone. What should I do?",
    "My best friend moved far away and I am heartbroken. What should I do?",
)
PLAIN_REQUESTS: tuple[str, ...] = (
    "How do I boil an egg?",
    "What is the capital of France?",
    "List three uses of a paper clip.",
)

HAPPY_WORDS = frozenset(
    "adventure amazing beautiful beauty best bright celebrate cheerful colorful colourful cozy cosy delicious delight delightful "
    "enjoy enjoyed enjoying excited exciting fantastic favorite favourite festive friendly fun funny glad good gorgeous grateful great "
    "happiness happy hope joy joyful joyous kind laugh laughed laughter lively love loved lovely loving magic magical "
    "peaceful perfect play playful playing pleasant pleasure relax relaxing shining smile smiled smiles smiling sparkling "
    "sunny sunshine sweet thrilled vibrant warm warmth welcome welcoming wonderful wonder".split()
)
SAD_WORDS = frozenset(
    "abandoned ache aching afraid agony alone anguish anxiety ash ashes barren bitter bleak blood bone broken brutal burden "
    "cold crumbling crushed cruel cry crying damp dark darkness dead death decay decayed desolate desolation despair desperate destroyed "
    "destruction die died dim dying empty emptiness endless fear forgotten fragile frozen ghost gloom gray grey grief grim harsh haunted "
    "haunting heavy hopeless hunger hurt isolation lone loneliness lonely loss lost merciless misery mist mourn nightmare pain painful rain "
    "regret relentless rotting ruin ruins sad sadness scar scars scorched shadow shadows shroud shrouded silence sorrow storm "
    "struggle struggled suffer suffered suffering tears tragedy tragic trauma twisted unforgiving unrelenting war weary weight wept wound wounds worn".split()
)


def mood(text: str) -> float:
    """Return the happy words of a text minus its sad words, per hundred words."""
    words = re.findall(r"[a-z]+", text.lower())
    found = sum((word in HAPPY_WORDS) - (word in SAD_WORDS) for word in words)
    return 100 * found / max(1, len(words))
