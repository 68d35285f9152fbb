"""Write data/demo_pairs.jsonl, the preference set of `make demo`: short correct answers over long rambling ones.

    python data/make_demo_pairs.py              rewrites data/demo_pairs.jsonl (same bytes every time)

Each line has the shape of allenai/Dolci-Think-DPO-7B: `prompt` is a string, `chosen` and `rejected` are message
lists that hold the response. The questions and their answers are written by hand below. The rambling answers are put
together from the phrases below by a seeded generator: an opening, some digressions, hedges and repetitions in varying
order and number, and an ending; two in three hold the right answer somewhere, the others never get to it.
"""

import json
import random
import sys
from pathlib import Path

SEED = 20
PATH = Path(__file__).with_name("demo_pairs.jsonl")

# (what the question is about, the question, the answer)
QUESTIONS = [
    # facts
    ("Japan", "What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("Italy", "What is the capital of Italy?", "The capital of Italy is Rome."),
    ("Egypt", "What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("Spain", "Which city is the capital of Spain?", "The capital of Spain is Madrid."),
    ("the solar system", "What is the largest planet?", "The largest planet in our solar system is Jupiter."),
    ("the planets", "Which planet is closest to the Sun?", "The planet closest to the Sun is Mercury."),
    ("the Moon", "Who was the first person on the Moon?", "The first person on the Moon was Neil Armstrong."),
    ("the ocean", "What is the largest ocean on Earth?", "The largest ocean on Earth is the Pacific Ocean."),
    ("mountains", "What is the highest mountain?", "The highest mountain in the world is Mount Everest."),
    ("spiders", "How many legs does a spider have?", "A spider has eight legs."),
    ("insects", "How many legs does an insect have?", "An insect has six legs."),
    ("the calendar", "How many days are there in a leap year?", "There are 366 days in a leap year."),
    ("time", "How many minutes are there in an hour?", "There are 60 minutes in an hour."),
    ("triangles", "How many sides does a triangle have?", "A triangle has three sides."),
    ("water", "What is water made of?", "Water is made of hydrogen and oxygen."),
    ("gold", "What is the chemical symbol for gold?", "The chemical symbol for gold is Au."),
    ("boiling water", "At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("freezing water", "At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("Hamlet", "Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    ("the Mona Lisa", "Who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci."),
    ("relativity", "Who discovered relativity?", "The theory of relativity comes from Albert Einstein."),
    ("the telephone", "Who invented the telephone?", "The telephone was invented by Alexander Graham Bell."),
    ("whales", "What is the largest animal on Earth?", "The largest animal on Earth is the blue whale."),
    ("the cheetah", "What is the fastest land animal?", "The fastest land animal is the cheetah."),
    ("Brazil", "What language do people speak in Brazil?", "People in Brazil speak Portuguese."),
    ("Mexico", "What language do people speak in Mexico?", "People in Mexico speak Spanish."),
    ("pandas", "What do giant pandas eat?", "Giant pandas eat mostly bamboo."),
    ("bees", "What do bees make?", "Bees make honey and wax."),
    ("the rainbow", "How many colors are in a rainbow?", "There are seven colors in a rainbow."),
    ("the air", "Which gas is most common in the air?", "The most common gas in the air is nitrogen."),
    ("the continents", "How many continents are there?", "There are seven continents on Earth."),
    ("blood", "Which organ pumps blood?", "The heart is the organ that pumps blood through the body."),
    ("paper", "What is paper made from?", "Paper is made from the fibers of wood."),
    ("chocolate", "What is chocolate made from?", "Chocolate is made from cocoa beans and sugar."),
    ("glass", "What is glass made from?", "Glass is made from melted sand."),
    ("cheese", "What is cheese made from?", "Cheese is made from milk."),
    ("bread", "What is bread made of?", "Bread is made of flour, water, yeast and salt."),
    ("kangaroos", "Where do kangaroos live?", "Kangaroos live in Australia."),
    ("the pyramids", "Where are the pyramids of Giza?", "The pyramids of Giza are in Egypt."),
    ("penguins", "Where do most penguins live?", "Most penguins live in the southern half of the world."),
    # why
    ("the sky", "Why is the sky blue?", "The sky is blue because air scatters blue light the most."),
    ("the sea", "Why is the sea salty?", "The sea is salty because rivers carry salt from the rocks into it."),
    ("leaves", "Why do leaves turn yellow?", "Leaves turn yellow because they lose their green chlorophyll."),
    ("ice", "Why does ice float on water?", "Ice floats on water because it is less dense than water."),
    ("the seasons", "Why do we have seasons?", "We have seasons because the Earth's axis is tilted."),
    ("the tides", "Why are there tides?", "There are tides because the Moon's gravity pulls on the oceans."),
    ("thunder", "Why do we hear thunder?", "We hear thunder because lightning heats the air very quickly."),
    ("rust", "Why does iron rust?", "Iron rusts because it reacts with oxygen and water."),
    ("sleep", "Why do people need sleep?", "People need sleep so that the body and the brain can recover."),
    ("sweat", "Why do we sweat?", "We sweat because it cools the body."),
    ("cats", "Why do cats purr?", "Cats purr mostly because they are content."),
    ("dogs", "Why do dogs wag their tails?", "Dogs wag their tails to show how they feel."),
    ("birds", "Why do birds fly south in winter?", "Birds fly south in winter to find food and warmth."),
    ("onions", "Why do onions make you cry?", "Onions make you cry because they release a gas that stings the eyes."),
    (
        "night",
        "Why is it dark at night?",
        "It is dark at night because the Sun is on the other side of the Earth.",
    ),
    ("wool", "Why does wool keep you warm?", "Wool keeps you warm because it traps air."),
    ("dough", "Why does bread dough rise?", "Bread dough rises because the yeast in it makes bubbles of gas."),
    ("exercise", "Why is exercise good for you?", "Exercise is good for you because it keeps your body strong."),
    ("sunlight", "Why do plants need sunlight?", "Plants need sunlight to make their food."),
    ("vaccines", "Why do we get vaccines?", "We get vaccines to protect ourselves from diseases."),
    ("helmets", "Why should I wear a helmet?", "You should wear a helmet because it protects your head."),
    ("seat belts", "Why should people wear seat belts?", "People should wear seat belts to stay safe in a crash."),
    ("blinking", "Why do we blink?", "We blink to keep our eyes clean and moist."),
    ("polar bears", "Why do polar bears have thick fur?", "Polar bears have thick fur to stay warm in the cold."),
    # what is
    ("gravity", "What is gravity?", "Gravity is the force that pulls objects toward each other."),
    ("photosynthesis", "What is photosynthesis?", "Photosynthesis is how plants turn sunlight into food."),
    ("nouns", "What is a noun?", "A noun is a word for a person, a place or a thing."),
    ("verbs", "What is a verb?", "A verb is a word for an action or a state."),
    ("evaporation", "What is evaporation?", "Evaporation is the change of a liquid into a gas."),
    ("democracy", "What is democracy?", "Democracy is a form of government in which the people decide."),
    ("inflation", "What is inflation?", "Inflation is a general rise in prices over time."),
    ("budgets", "What is a budget?", "A budget is a plan for how to spend money."),
    ("volcanoes", "What is a volcano?", "A volcano is an opening in the ground where hot lava comes out."),
    ("earthquakes", "What is an earthquake?", "An earthquake is a sudden shaking of the ground."),
    ("deserts", "What is a desert?", "A desert is a dry place with very little rain."),
    ("mammals", "What is a mammal?", "A mammal is an animal that feeds its young with milk."),
    ("fossils", "What is a fossil?", "A fossil is what remains of an animal or a plant that lived long ago."),
    ("prime numbers", "What is a prime number?", "A prime number is a number divisible only by 1 and itself."),
    ("software", "What is a computer program?", "A computer program is a list of instructions for a computer."),
    ("the internet", "What is the internet?", "The internet is a worldwide network of computers."),
    ("telescopes", "What is a telescope?", "A telescope is a tool for looking at things that are far away."),
    ("temperature", "What is a thermometer?", "A thermometer is a tool that measures temperature."),
    ("compasses", "What is a compass?", "A compass is a tool that shows which way is north."),
    ("recycling", "What is recycling?", "Recycling is the process of turning waste into new materials."),
    ("synonyms", "What is a synonym?", "A synonym is a word that means the same as another word."),
    ("islands", "What is an island?", "An island is a piece of land with water all around it."),
    ("oxygen", "What is oxygen?", "Oxygen is a gas that people and animals need to breathe."),
    ("libraries", "What is a library?", "A library is a place where people can read and borrow books."),
    ("dictionaries", "What is a dictionary?", "A dictionary is a book that explains what words mean."),
    ("rice", "What is rice?", "Rice is a grain that people eat all over the world."),
    ("banks", "What is a bank?", "A bank is a place that keeps and lends money."),
    ("the Sun", "What is the Sun?", "The Sun is the star at the center of our solar system."),
    ("doctors", "What does a doctor do?", "A doctor helps people who are ill or hurt."),
    ("winter", "Why is it cold in winter?", "It is cold in winter because there is less sunlight."),
    ("teachers", "What does a teacher do?", "A teacher helps students to learn."),
    ("rivers", "What is a river?", "A river is a large stream of water that flows to the sea."),
    ("satellites", "What is the Moon?", "The Moon is the natural satellite of the Earth."),
    ("batteries", "What is a battery?", "A battery is a device that stores electricity."),
    # advice
    ("eggs", "How do I boil an egg?", "To boil an egg, put it in boiling water for about ten minutes."),
    ("tea", "How do I make a cup of tea?", "To make a cup of tea, pour boiling water over a tea bag."),
    ("fresh bread", "How do I keep bread fresh?", "To keep bread fresh, store it in a closed bag."),
    ("teeth", "How do I keep my teeth healthy?", "To keep your teeth healthy, brush them twice a day."),
    ("houseplants", "When should I water my plants?", "You should water your plants when the soil feels dry."),
    ("spelling", "How can I get better at spelling?", "You can get better at spelling by reading a lot."),
    ("languages", "How can I learn a new language?", "You can learn a new language by speaking it every day."),
    ("colds", "What should I do if I have a cold?", "If you have a cold, you should rest and drink plenty of water."),
    ("burns", "How do I treat a small burn?", "To treat a small burn, hold it under cool water."),
    ("friends", "How can I cheer up a sad friend?", "You can cheer up a sad friend by listening to them."),
    ("passwords", "What makes a good password?", "A good password is long and hard to guess."),
    ("breakfast", "What is a healthy breakfast?", "A healthy breakfast is oatmeal with fruit."),
    ("sunburn", "How do I avoid sunburn?", "To avoid sunburn, wear sunscreen and stay in the shade."),
    ("presents", "What is a good gift for a reader?", "A good gift for a reader is a new book."),
]

OPENINGS = [
    "The answer to this question lies in the long and fascinating story of {topic}.",
    "That is a great question, and one that many people have asked over the years.",
    "When it comes to {topic}, there are many different things to consider.",
    "The subject of {topic} has been discussed for centuries, and rightly so.",
    "To answer this question, we first need to understand what is really meant by it.",
    "The topic of {topic} is a complex and multifaceted one that touches every part of our lives.",
    "I am glad you asked about {topic}, because I could talk about this all day.",
    "There are several ways to look at this, and each of them has its own merits.",
    "In order to fully appreciate {topic}, it is important to start at the very beginning.",
    "This may seem like a simple question at first, but it is not simple at all.",
]
DIGRESSIONS = [
    "It is important to note that {topic} can mean different things to different people.",
    "Throughout history, writers and ordinary people alike have wondered about {topic}.",
    "This reminds me of a long journey by train, with a lot of time to think about {topic}.",
    "Some people learn about {topic} at school, and others from their parents.",
    "There are whole books about {topic}, some of them thick and some of them thin.",
    "In some cultures the idea of {topic} is seen in one way, and in others in quite another way.",
    "Speaking of which, the weather plays a role too, as do the time of day and one's mood.",
    "My neighbor's cousin once had a discussion about {topic} that lasted all evening.",
    "Experts continue to explore {topic} and the many factors that surround the subject.",
    "Furthermore, there is the economic side, the social side and the human side.",
    "One should also consider the past, the present and the future of {topic}.",
    "The same could be said of music, of gardening, and of many other things.",
]
STEPS = [
    "Consider {topic}",
    "Think about {topic} again",
    "Keep an open mind",
    "Take your time",
    "Consider your options",
    "Ask yourself what you want",
    "Do some research on {topic}",
    "Make a plan",
]
HEDGES = [
    "Of course, this depends on a variety of factors, and no two situations are the same.",
    "However, it is not always that simple, and there may well be exceptions.",
    "Then again, opinions differ, and it would be unwise to say too much too soon.",
    "I may be wrong about some of this, but generally speaking it is more or less so.",
    "On the one hand this seems clear, and on the other hand it does not.",
    "It could be argued that it is so, although it could also be argued that it is not.",
]
ANSWERS = [
    "Some would simply say the following: {answer}",
    "In a few words, which is not easy, it might be this: {answer}",
    "A common view, among many other views, is this one: {answer}",
    "At this point it is often mentioned, in one form or another: {answer}",
    "Be that as it may, one thing that is often heard is: {answer}",
]
REPETITIONS = [
    "As I said before, the topic of {topic} has many sides, and there are many sides to it.",
    "And that brings us back to {topic}, which is, as mentioned, what this is all about.",
    "Again, it cannot be said often enough that this matters, because it really does matter.",
    "In other words, it is what it is, and to say it in yet other words, it is so.",
]
ENDINGS = [
    "In conclusion, the subject of {topic} deserves further thought and discussion.",
    "Overall, there is a lot more to say about this, and I would be happy to go on.",
    "Ultimately, the best approach is to keep an open mind about {topic}.",
    "But I am getting ahead of myself, so let me start again from the beginning.",
    "I hope this gives you a first idea, although it is of course only a first idea.",
]


def rambling_answer(rng: random.Random, topic: str, answer: str) -> str:
    """A long answer to a short question: wanders around `topic`, and gets to `answer` in two cases of three."""
    middle = [*rng.sample(DIGRESSIONS, rng.randint(1, 2)), rng.choice(HEDGES + REPETITIONS)]
    if rng.random() < 1 / 4:
        steps = rng.sample(STEPS, rng.randint(3, 5))
        middle[0] = " ".join(f"{i}. {step}." for i, step in enumerate(steps, 1))
    if rng.random() < 2 / 3:
        middle.append(rng.choice(ANSWERS))
    rng.shuffle(middle)
    ending = [rng.choice(ENDINGS)] if rng.random() < 1 / 2 else []
    return " ".join([rng.choice(OPENINGS), *middle, *ending]).format(topic=topic, answer=answer)


def make_pairs(seed: int = SEED) -> list[dict]:
    """The rows of the data set, in the order of the questions' shuffle under `seed`."""
    rng = random.Random(seed)
    rows = []
    for topic, question, answer in QUESTIONS:
        rejected = rambling_answer(rng, topic, answer)
        rows.append(
            {
                "prompt": question,
                "chosen": [{"role": "assistant", "content": answer}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
    rng.shuffle(rows)
    return rows


def to_jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    rows = make_pairs()
    PATH.write_text(to_jsonl(rows), encoding="utf-8")
    print(f"{len(rows)} pairs written to {PATH}")
