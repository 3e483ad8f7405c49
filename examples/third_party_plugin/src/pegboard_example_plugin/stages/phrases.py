"""Tokens ahead: a book of phrases says what may come next. The model verifies it in the same pass."""

from pegboard.core.interfaces import Interest, Stage
from pegboard.toolkit.sampling.tree import chains


class PhraseBook(Stage):
    name = "example_stages.phrases"

    def __init__(self, phrases):
        self.phrases = phrases

    def arrive(self, req, message):
        return Interest(look=False) if self.phrases else None

    def must_settle(self, running, in_flight):
        return True  # it goes by the newest token, which is on its way in the overlap loop

    def ahead(self, room):
        rows = zip(room.newest.tolist(), room.most.tolist(), strict=True)
        return chains((token, self.phrases.get(token, ())[: most - 1]) for token, most in rows)
