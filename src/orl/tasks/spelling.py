"""Spelling tasks: count a letter in a short text, spell a word backward; both in capitals.

The tokenizer learns no merge of two capitals (`orl.tasks.tokenizer`), so in these tasks a letter is a token. Written in
lower case, the same words would be cut into pieces whose letters a small model has to know by heart.

**Source:** items from reasoning-gym `letter_counting`, `spell_backward`; capitals and workings ours.
"""

from dataclasses import dataclass

from orl.tasks.gym import Entry, GymTask, Written


@dataclass(frozen=True, kw_only=True)
class LetterCountingDifficulty:
    """Size of a text to count in."""

    min_words: int = 2  # fewest words
    max_words: int = 3  # most words
    our_max_letters: int = 8  # longest word
    our_max_count: int = 6  # largest answer


def write_letter_counting(entry: Entry, difficulty: LetterCountingDifficulty) -> Written | None:
    """Count word by word, then add up; skip texts with digits, accents or long words."""
    facts = entry["metadata"]
    words = [word.upper() for word in facts["span"]]
    letter = facts["target_letter"].upper()
    if not all(word.isascii() and word.isalpha() and len(word) <= difficulty.our_max_letters for word in words):
        return None
    counts = [word.count(letter) for word in words]
    total = sum(counts)
    if str(total) != entry["answer"] or total > difficulty.our_max_count:
        return None
    lines = [f"{word}: {count}" for word, count in zip(words, counts, strict=True)]
    lines.append(f"{' + '.join(map(str, counts))} = {total}")
    prompt = f'How many times does the letter "{letter}" appear in the text: "{" ".join(words)}"?'
    return Written(prompt=prompt, response="\n".join([*lines, f"#### {total}"]))


@dataclass(frozen=True, kw_only=True)
class SpellBackwardDifficulty:
    """Length of a word to spell."""

    min_word_len: int = 3  # shortest word
    max_word_len: int = 6  # longest word


def write_spell_backward(entry: Entry, difficulty: SpellBackwardDifficulty) -> Written | None:
    """Answer with the reversed word."""
    word = entry["metadata"]["word"].upper()
    if not (word.isascii() and word.isalpha()):
        return None
    return Written(prompt=f"Spell this word backward (example: SUN -> NUS): {word}", response=word[::-1])


LETTER_COUNTING = GymTask(
    name="letter_counting",
    description="Count how often a letter appears in two or three words.",
    dataset="letter_counting",
    difficulty=LetterCountingDifficulty(),
    write=write_letter_counting,
)
SPELL_BACKWARD = GymTask(
    name="spell_backward",
    description="Spell a short word backward.",
    dataset="spell_backward",
    difficulty=SpellBackwardDifficulty(),
    write=write_spell_backward,
)
