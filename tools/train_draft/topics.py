"""What the built-in prompts are about, and how they ask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    """Topics of one kind, and the prompts that any of them fits into."""

    topics: tuple[str, ...]
    templates: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(one.split()) for one in text.split(";"))


IDEAS = Subject(
    _words(
        "gravity; photosynthesis; inflation; democracy; plate tectonics; the water cycle; evolution; black holes; "
        "vaccines; supply and demand; the immune system; electricity; magnetism; the Doppler effect; DNA; "
        "antibiotics; entropy; the greenhouse effect; nuclear fusion; the Big Bang; probability; prime numbers; "
        "the Pythagorean theorem; sound waves; renewable energy; recycling; machine learning; encryption; "
        "the internet; blockchain; operating systems; databases; computer networks; artificial intelligence; "
        "the Renaissance; the Roman Empire; the Industrial Revolution; the French Revolution; the Cold War; "
        "the Silk Road; human rights; the stock market; taxes; insurance; globalization; memory; sleep; habits; "
        "stress; motivation; empathy; creativity; critical thinking; philosophy; ethics; poetry; photography; "
        "jazz; impressionism; architecture; rhetoric; logic; statistics; calculus; fractions; volcanoes; "
        "earthquakes; tides; rainbows; glaciers; deserts; coral reefs; rainforests; fermentation; enzymes; "
        "hormones; atoms; acids and bases; friction; inertia; optics; semiconductors; batteries; satellites; "
        "rockets; telescopes; compilers"
    ),
    (
        "What is {}?",
        "Explain {} to a ten-year-old.",
        "Explain {} in two sentences.",
        "Why does {} matter in everyday life?",
        "List five facts about {}.",
        "Write a short introduction to {} for a school newspaper.",
        "What are common misunderstandings about {}?",
        "Give me three questions for a quiz on {}, with their answers.",
        "How would you teach {} in a single lesson?",
        "Write a haiku about {}.",
        "Summarize what is known about {} in one paragraph.",
        "What should I read first if I want to learn about {}?",
        "Describe {} with an analogy.",
        "Write a dialogue between a teacher and a student about {}.",
        "What are the most important terms in the field of {}? Define each in one line.",
        "I have an exam on {} tomorrow. Make me a short study guide.",
    ),
)

ACTIVITIES = Subject(
    _words(
        "learn the guitar; start running; bake bread; plan a wedding; move to another city; write a novel; "
        "save money; prepare for a job interview; train a puppy; grow tomatoes; learn Spanish; "
        "host a dinner party; organize a closet; start a small business; give a speech; repair a bicycle; "
        "paint a room; meditate; study for an exam; plan a trip; write a cover letter; build a website; "
        "make new friends; quit smoking; improve my handwriting; learn to swim; take better photos; "
        "start a podcast; choose a laptop; clean an oven; teach a child to read; run a meeting; "
        "negotiate a salary; keep a journal; learn chess; make a budget; set up a home office; "
        "pack for a long flight; care for houseplants; sleep better; reduce food waste; organize a charity event; "
        "write a poem; fix a leaking tap"
    ),
    (
        "How do I {}?",
        "Give me a step-by-step plan to {}.",
        "What do I need before I {}?",
        "What mistakes should I avoid when I {}?",
        "Write a checklist for someone who wants to {}.",
        "How long does it take to {}?",
        "I want to {} but I have very little time. What do you suggest?",
        "Write an encouraging message to a friend who is about to {}.",
        "What does it cost to {}? Break it down.",
        "Give me five tips to {}.",
        "Write a one-week schedule that helps me to {}.",
        "My friend says that it is impossible to {}. What would you answer?",
    ),
)

PLACES = Subject(
    _words(
        "Paris; Tokyo; Iceland; Morocco; New York; the Alps; Brazil; India; Egypt; Kenya; Australia; Canada; "
        "Norway; Italy; Greece; Mexico; Peru; Thailand; Vietnam; South Korea; China; Turkey; Spain; Portugal; "
        "Ireland; Scotland; Germany; Poland; Switzerland; New Zealand; Argentina; Chile; South Africa; Indonesia; "
        "Cuba; Amsterdam; Istanbul; Vienna; Berlin; London; Rome; Lisbon; Singapore; Hawaii; Alaska; the Amazon; "
        "the Sahara; the Great Barrier Reef"
    ),
    (
        "What is the best time of the year to visit {}?",
        "Plan three days in {} for a family with two children.",
        "What is {} famous for?",
        "Describe the climate of {}.",
        "Which foods should I try in {}?",
        "Write a postcard from {}.",
        "Tell me about the history of {}.",
        "What should a visitor know about customs in {}?",
        "Write a short travel advertisement for {}.",
        "How do people get around in {}?",
        "Name three sights in {} and say why they are worth a visit.",
        "Write the opening paragraph of a story that takes place in {}.",
    ),
)

THINGS = Subject(
    _words(
        "a bicycle; a lighthouse; an umbrella; a piano; a robot; a dragon; a dog; a cat; an elephant; an owl; "
        "a whale; a bee; a spider; a penguin; an oak tree; a rose; a library; a train; a ship; a clock; a mirror; "
        "a bridge; a castle; a garden; a kitchen; a smartphone; a newspaper; a violin; a compass; a map; "
        "a candle; a river; a mountain; a snowstorm; a market; a museum; a school; a hospital; a farm; "
        "a spaceship; a time machine; a secret door; an old photograph; a lost letter; a wizard; a detective; "
        "a pirate; a baker; a gardener; a nurse; an astronaut; a chef; a fisherman"
    ),
    (
        "Write a short story about {}.",
        "Write a four-line poem about {}.",
        "Describe {} without naming it.",
        "Write a riddle whose answer is {}.",
        "Tell me a joke about {}.",
        "What would {} say if it could write a diary?",
        "List ten words that describe {}.",
        "Write a conversation between {} and the moon.",
        "Write a product review of {}.",
        "Invent a legend that explains how {} came to be.",
        "Write a limerick about {}.",
        "Give me five titles for a book about {}.",
    ),
)

FOODS = Subject(
    _words(
        "pancakes; tomato soup; fried rice; lasagna; an omelette; chocolate cake; a Greek salad; chicken curry; "
        "guacamole; banana bread; vegetable stew; apple pie; sushi; tacos; risotto; hummus; ratatouille; "
        "mashed potatoes; lemonade; french fries; meatballs; pad thai; paella; dumplings; oatmeal; cheesecake; "
        "gazpacho; pizza; scrambled eggs; chili"
    ),
    (
        "How do I make {}?",
        "Give me a recipe for {} with a list of ingredients.",
        "What goes well with {}?",
        "Is there a healthy version of {}?",
        "Where does {} come from?",
        "Write a menu entry for {}.",
        "What can I do with leftover {}?",
        "How do I make {} for ten people?",
        "Which spices fit {}?",
    ),
)

CODE = Subject(
    _words(
        "reverses a string; checks whether a number is prime; sorts a list of names; counts the words of a text; "
        "finds the largest number in a list; removes duplicates from a list; computes the factorial of a number; "
        "reads a CSV file; converts Celsius to Fahrenheit; checks whether a word is a palindrome; "
        "merges two sorted lists; computes the Fibonacci numbers; counts the vowels in a string; "
        "validates an email address; generates a random password; finds the common elements of two lists; "
        "flattens a nested list; computes the average of numbers; reads a JSON file; writes lines to a file; "
        "finds the second smallest number; rotates a list; computes the greatest common divisor; "
        "counts how often each letter occurs; splits a text into sentences; searches a sorted list; "
        "prints a multiplication table; rounds prices to two decimals; downloads a web page; "
        "measures how long a function takes; adds two matrices"
    ),
    (
        "Write a Python function that {}.",
        "Write a JavaScript function that {}.",
        "Write a Python function that {}, with a docstring and an example.",
        "Write a program in C that {}.",
        "Explain step by step how a program {}.",
        "Write unit tests for a function that {}.",
        "What can go wrong in a function that {}?",
    ),
)

WORK = Subject(
    _words(
        "a late delivery; a cancelled meeting; a new product; a broken printer; a team lunch; a holiday schedule; "
        "a bug report; a price increase; a job application; a missed deadline; a birthday; a refund; "
        "a conference; a new colleague; a complaint; an office move; a survey; a training course; a lost package; "
        "a budget review; a promotion; a resignation; a power cut; a password reset; a software update; "
        "an invoice; a project plan; a customer visit; a safety rule; a parking problem"
    ),
    (
        "Write a polite email about {}.",
        "Write a short notice to all employees about {}.",
        "Draft an apology to a customer because of {}.",
        "Write three sentences for a chat message about {}.",
        "What should I ask before I write about {}?",
        "Write an agenda for a meeting about {}.",
        "Rewrite this in a friendlier tone: We have to talk about {} and I expect an answer today.",
        "Summarize in one sentence: After a talk about {}, the team agreed to wait until Monday and ask the manager.",
        "Turn this into a list of tasks: Look into {}, call the supplier, write down what was agreed, tell the team.",
    ),
)

SUBJECTS = (IDEAS, ACTIVITIES, PLACES, THINGS, FOODS, CODE, WORK)

PAIR_TEMPLATES = (
    "Compare {} and {}.",
    "What do {} and {} have in common?",
    "Which would you explain first, {} or {}? Say why.",
    "Write a short paragraph that mentions both {} and {}.",
)
"""For two of `IDEAS`."""
