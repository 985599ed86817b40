"""What the dialogues are made of: topics with the sentences that say, ask for and answer them, and small talk. Floor 7."""
from __future__ import annotations

import re
from typing import NamedTuple


class Topic(NamedTuple):
    """Something that can be said of a key {k} with a value {v}. A key "name" is a made-up person."""

    value: str
    keys: tuple[str, ...]
    says: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    untold: str


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(","))


TOPICS = (
    Topic("name", ("",), ("My name is {v}.", "I am {v}.", "I am called {v}.", "Call me {v}.", "You can call me {v}."),
          ("What is my name?", "Who am I?", "What am I called?", "Do you know my name?", "Say my name."),
          "Your name is {v}.", "your name"),
    Topic("name",
          _keys("dog,cat,horse,rabbit,parrot,sister,brother,mother,father,son,daughter,boss,teacher,friend,neighbour,doctor,"
                "boat,robot,street,town,school,team,ship,village,wife,husband,cousin,uncle,aunt,band,bird,goldfish"),
          ("My {k} is called {v}.", "The name of my {k} is {v}.", "I have a {k} called {v}.", "My {k}'s name is {v}.",
           "I have a {k}. It is called {v}."),
          ("What is my {k} called?", "What is the name of my {k}?", "What is my {k}'s name?",
           "Do you remember the name of my {k}?", "Tell me the name of my {k}.", "What do I call my {k}?"),
          "Your {k} is called {v}.", "the name of your {k}"),
    Topic("number",
          _keys("door,gate,safe,garage,bike,locker,alarm,suitcase,phone,cellar,office,shed,printer,lift,vault,archive"),
          ("The code for the {k} is {v}.", "The code of the {k} is {v}.", "The {k} code is {v}.",
           "The {k} opens with {v}."),
          ("What is the code for the {k}?", "What is the code of the {k}?", "What is the {k} code?",
           "How do I open the {k}?",
           "Tell me the code for the {k}.", "Do you remember the code for the {k}?"),
          "The code for the {k} is {v}.", "the code for the {k}"),
    Topic("number", _keys("room,bus,flight,seat,order,account,ticket,house,phone,train,table,gate"),
          ("My {k} number is {v}.", "The number of my {k} is {v}.", "I have {k} number {v}."),
          ("What is my {k} number?", "What is the number of my {k}?", "Which {k} number do I have?",
           "Tell me my {k} number."),
          "Your {k} number is {v}.", "your {k} number"),
    Topic("place", ("",), ("I live in {v}.", "My home is in {v}.", "I moved to {v}."),
          ("Where do I live?", "Where is my home?", "Which town do I live in?", "In which place do I live?"),
          "You live in {v}.", "where you live"),
    Topic("place", ("",), ("I work in {v}.", "My office is in {v}.", "My job is in {v}."),
          ("Where do I work?", "Where is my office?", "Where is my job?"), "You work in {v}.", "where you work"),
    Topic("place", ("",), ("I was born in {v}.", "I come from {v}.", "I am from {v}."),
          ("Where was I born?", "Where do I come from?", "Where am I from?"), "You come from {v}.",
          "where you come from"),
    Topic("colour", _keys("car,coat,house,bike,door,hat,bag,kitchen,sofa,umbrella,boat,scarf"),
          ("My {k} is {v}.", "The colour of my {k} is {v}.", "I have a {v} {k}.", "I painted my {k} {v}."),
          ("What colour is my {k}?", "What is the colour of my {k}?", "Which colour does my {k} have?"),
          "Your {k} is {v}.", "the colour of your {k}"),
    *(Topic(kind, (kind,), ("My favourite {k} is {v}.", "The {k} I like best is {v}.", "I like {v} best of any {k}."),
            ("What is my favourite {k}?", "Which {k} do I like best?", "Do you know my favourite {k}?"),
            "Your favourite {k} is {v}.", "your favourite {k}")
      for kind in ("colour", "food", "drink", "animal", "hobby")),
    Topic("age", ("",), ("I am {v} years old.", "My age is {v}.", "I turned {v} this year."),
          ("How old am I?", "What is my age?", "Do you know how old I am?"), "You are {v} years old.", "how old you are"),
    Topic("time", _keys("train,bus,meeting,flight,party,dinner,film,concert,class,lunch,call,interview"),
          ("My {k} is at {v}.", "The {k} is at {v}.", "The {k} starts at {v}.", "I have a {k} at {v}."),
          ("When is my {k}?", "When is the {k}?", "At what time is the {k}?", "What time is my {k}?",
           "When does the {k} start?"),
          "The {k} is at {v}.", "when the {k} is"),
    Topic("day", _keys("exam,holiday,birthday,visit,trip,match,wedding,appointment,market"),
          ("My {k} is on {v}.", "The {k} is on {v}.", "I have a {k} on {v}."),
          ("On which day is my {k}?", "Which day is the {k}?", "What day is my {k}?", "On what day is the {k}?"),
          "The {k} is on {v}.", "the day of the {k}"),
    Topic("place", ("name",), ("My friend {k} lives in {v}.", "You should know that {k} lives in {v}.",
                               "A certain {k} lives in {v}."),
          ("Where does {k} live?", "In which place does {k} live?", "Do you know where {k} lives?"),
          "I know that {k} lives in {v}.", "where {k} lives"),
    Topic("food", ("name",), ("My friend {k} likes {v}.", "You should know that {k} likes {v}.",
                              "I think {k} likes {v}."),
          ("What does {k} like?", "Do you know what {k} likes?", "Tell me what {k} likes."),
          "I know that {k} likes {v}.", "what {k} likes"),
    Topic("item", _keys("key,wallet,phone,passport,glasses,book,laptop,hammer,map,letter,ring,ticket"),
          ("I put the {v} beside my {k}.", "My {k} is beside the {v}.", "The {k} is beside the {v}."),
          ("Where is my {k}?", "Where is the {k}?", "Do you know where my {k} is?"),
          "The {k} is beside the {v}.", "where the {k} is"),
)
LIST = Topic("item", _keys("shopping,packing,wish,tool,party,garden,kitchen,holiday"),
             ("On my {k} list: {v}.", "My {k} list: {v}.", "Put {v} on my {k} list.", "I need a {k} list with {v}.",
              "My {k} list has {v}."),
             ("What is on my {k} list?", "Read me my {k} list.", "Tell me my {k} list.", "What does my {k} list say?",
              "Show me the {k} list."),
             "Your {k} list has {v}.", "your {k} list")
LIST_ADDS = ("Add {v} to my {k} list.", "Put {v} on my {k} list too.", "Add {v} to the {k} list, please.")
CORRECTIONS = ("No, it is {v}.", "Sorry, it is {v}.", "No, I meant {v}.", "Wait, it is {v}, not {old}.",
               "Not {old}, {v}.", "I was wrong, it is {v}.", "No, {v}.", "Sorry, I meant {v}, not {old}.")
CORRECTED = ("No, {said}", "Sorry, {said}", "Actually, {said}", "Correction: {said}", "I was wrong, {said}")
SYSTEMS = ("You are a helpful assistant.", "You are a friendly assistant with a good memory.", "Answer in one sentence.",
           "You remember what the user says.", "Be brief.")
THINK = "Think before you answer."

_HELLO = "Hello! Tell me something, and ask me for it later."
_UNKNOWN = "I do not know that. I only know what you tell me."
_SEE = "I see. Tell me more, or ask me for something that you said."
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning.", "Good evening!", "Hello, computer."), _HELLO),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"),
     "I am fine, thank you. What can I remember for you?"),
    (("Thanks", "Thank you.", "Thanks a lot!", "Thank you very much.", "Great, thanks."), "You are welcome."),
    (("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Tell me about yourself."),
     "I am a very small language model. I remember what you tell me in this conversation."),
    (("What can you do?", "How does this work?", "Help", "Help me.", "What can I say?", "What can you remember?"),
     "Tell me facts, like names, numbers, places or lists. Correct them when they change. Then ask me for them."),
    (("Bye", "Goodbye.", "Good night.", "See you!"), "Goodbye! It was nice to talk to you."),
    (("Good.", "Nice.", "Very good!", "Right.", "Perfect.", "That is right.", "Yes.", "OK", "Exactly.", "Well done."),
     "I am glad to hear it."),
    (("That is wrong.", "No.", "Wrong!", "No, that is not right."), "I am sorry. Please tell me what is right."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "What does a cache say when it forgets? Nothing. It does not remember that you asked."),
    (("Tell me a story.", "Once upon a time", "Please tell me a short story.", "Write a story."),
     "Once upon a time there was a sailor who lived in a lighthouse. Every evening he wrote down what he had seen, and "
     "every morning he read it again. So he never had to look at the same sea twice."),
    (("It is raining today.", "I am tired.", "The weather is nice.", "It was a long day.", "I had a good breakfast.",
      "I like music.", "The sun is shining.", "We went for a walk.", "I am at home now.", "It is late.", "I slept well.",
      "I am hungry.", "The train was late again.", "There is snow on the roof.", "I read a good book."), _SEE),
    (("What is the capital of {p}?", "Who wrote {p}?", "How far is {p}?", "What is the meaning of life?",
      "What time is it?", "What is two plus two?", "How is the weather in {p}?", "Who is the king of {p}?",
      "What is a cache?", "Why is the sky blue?", "When was {p} built?", "Can you explain {p} to me?",
      "What happened in {p}?", "And a prefix?", "How many people live in {p}?"), _UNKNOWN),
)

_TEXTS = (*(text for topic in (*TOPICS, LIST) for text in (*topic.keys, *topic.says, *topic.asks, topic.answer, topic.untold)),
          *(text for forms, answer in SMALL_TALK for text in (*forms, answer)), *LIST_ADDS, *CORRECTIONS, *CORRECTED, *SYSTEMS)
PHRASE_WORDS = sorted({word for text in _TEXTS for word in re.findall(r"[a-z]{3,}", text.lower())})
