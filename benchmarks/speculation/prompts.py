"""What the model is asked: to quote a text that it is given, and to write freely."""

from __future__ import annotations

from collections.abc import Sequence

_MINUTES = """Minutes of the allotment society, 3 March. Present were Anna Weber, Tom Okafor, Li Na and Piet de Vries.
The water pump in the north field is broken since the frost in January. Tom Okafor will ask two firms for an offer.
The society agreed to spend at most 400 euros on it. Li Na reported that eleven plots are free, and that nineteen
people wait for one. The plots will be given away by lot on Saturday, 12 April. Piet de Vries asked for a second
compost heap behind the shed. All were in favour. Anna Weber closed the meeting at nine o'clock."""

_RECIPE = """For the dough, mix 500 grams of flour, 300 millilitres of lukewarm water, one teaspoon of salt and seven
grams of dry yeast. Knead the dough for ten minutes, until it is smooth. Cover the bowl with a damp towel and let the
dough rise for one hour in a warm place. Heat the oven to 220 degrees. Shape the dough into two loaves, put them on a
tray and cut each of them three times with a sharp knife. Bake the loaves for thirty minutes. Let them cool on a rack
before you cut them."""

_NOTES = """Version 2.4 of the program brings three changes. The search now finds words that are misspelled by one
letter. The calendar shows weeks that begin on Sunday, if you choose so in the settings. The export to spreadsheets
keeps the colours of the cells. Two faults were mended: the program no longer stops when the disk is full, and the
list of contacts is sorted correctly in Danish. Version 2.4 needs 200 megabytes of memory, which is 20 megabytes more
than version 2.3."""

_LETTER = """Dear Mr Brandt, thank you for your order of 14 October. The blue bicycle, number 5512, has left our
warehouse this morning. The parcel service will bring it to your door between Tuesday and Thursday. Please check the
parcel before you sign for it. The lamp that you have ordered with it, number 0871, is not in stock. We will send it
in the first week of November, and we will not charge you for the second parcel. If you would rather have your money
back, please write to us by the end of the month."""

_CODE = """def total_price(items, tax_rate, discount):
    total = 0.0
    for item in items:
        price = item.price * item.count
        if item.on_sale:
            price = price * (1.0 - discount)
        total = total + price
    total = total * (1.0 + tax_rate)
    return round(total, 2)


def print_invoice(customer, items, tax_rate, discount):
    print("Invoice for", customer.name)
    for item in items:
        print(item.name, item.count, item.price)
    print("Total:", total_price(items, tax_rate, discount))"""

_DATA = """{"station": "Harbour", "height": 12, "readings": [
  {"day": "Monday", "wind": 14, "rain": 0.0, "sky": "clear"},
  {"day": "Tuesday", "wind": 22, "rain": 3.5, "sky": "overcast"},
  {"day": "Wednesday", "wind": 31, "rain": 11.0, "sky": "storm"},
  {"day": "Thursday", "wind": 18, "rain": 1.5, "sky": "overcast"},
  {"day": "Friday", "wind": 9, "rain": 0.0, "sky": "clear"}]}"""

QUOTING: Sequence[str] = (
    f"Repeat the following minutes, but write 'Monday, 14 April' in place of 'Saturday, 12 April'.\n\n{_MINUTES}",
    f"Here are minutes of a meeting. Copy all sentences that name a person.\n\n{_MINUTES}",
    f"Repeat the following recipe for 600 grams of flour in place of 500 grams.\n\n{_RECIPE}",
    f"Summarise the following notes by copying their three most important sentences.\n\n{_NOTES}",
    f"Write the following letter again, to Mrs Lindqvist in place of Mr Brandt.\n\n{_LETTER}",
    f"Rename the variable total to amount in this program. Show the whole program.\n\n{_CODE}",
    f"Add a docstring to both functions of this program. Show the whole program.\n\n{_CODE}",
    f"Change the wind of Wednesday to 35 in this document. Show the whole document.\n\n{_DATA}",
)
"""Edits of a given text, and summaries by extraction."""

FREE: Sequence[str] = (
    "Tell a story about a fox who wants to learn to swim.",
    "Explain why the sky is blue, in simple words.",
    "What should I think of before I adopt a dog?",
    "Describe a market in a small town on a rainy morning.",
    "Give me some advice for my first job interview.",
    "How does a sailing boat sail against the wind?",
    "Write a poem about the last day of summer.",
    "What are the differences between a novel and a short story?",
)
"""Nothing of the answer stands in the prompt."""
