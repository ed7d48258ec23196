"""Words and sentence templates of the four contrastive suites.

Tables only; `suites.py` says how they are put together and docs/suites.md shows what comes of it.
Templates are read as those of `lexicon.py`. Besides, a German template holds both renderings of
what depends on the address, informal first ("{you:hast du/haben Sie}").
"""

from docnmt.lexicon import Templates

# ---------------------------------------------------------------------------- asides

# What stands between evidence and sentence: nobody acts and nobody is spoken to, so that there is
# nothing to which a "did", a "you" or an answer in half a sentence could refer.
ASIDES: Templates = (
    ("{aside:the} was {quality}.", "{aside:der} war {quality}."),
    ("{aside:the} was {quality} again.", "{aside:der} war wieder {quality}."),
    ("{aside:the} is still {quality}.", "{aside:der} ist noch {quality}."),
    ("On {day}, {aside:the} was {quality}.", "Am {day} war {aside:der} {quality}."),
    ("In the evening, {aside:the} was {quality}.", "Am Abend war {aside:der} {quality}."),
    ("{aside:the} is always so {quality}.", "{aside:der} ist immer so {quality}."),
)
ASIDE_THINGS: dict[str, tuple[str, str]] = {
    "kitchen": ("Küche", "f"), "garden": ("Garten", "m"), "street": ("Straße", "f"),
    "wall": ("Wand", "f"), "floor": ("Boden", "m"), "bridge": ("Brücke", "f"),
    "house": ("Haus", "n"), "roof": ("Dach", "n"), "room": ("Zimmer", "n"),
    "church": ("Kirche", "f"), "cellar": ("Keller", "m"), "yard": ("Hof", "m"),
}  # fmt: skip
QUALITIES = {
    "cold": "kalt", "wet": "nass", "dry": "trocken", "clean": "sauber", "dirty": "schmutzig",
    "dark": "dunkel",
}  # fmt: skip

# ---------------------------------------------------------------------------- deixis

POSSESSIONS: dict[str, tuple[str, str]] = {
    "key": ("Schlüssel", "m"), "suitcase": ("Koffer", "m"), "bag": ("Tasche", "f"),
    "camera": ("Kamera", "f"), "book": ("Buch", "n"), "picture": ("Bild", "n"),
}  # fmt: skip

# In German, these show how one is addressed; in English, none of them does.
YOU_CUES: Templates = (
    ("You forgot your {item}.", "{you:du hast/Sie haben} {item:{you:deinen/Ihren}} vergessen."),
    ("You are very patient.", "{you:du bist/Sie sind} sehr geduldig."),
    ("Please open the door.", "{you:öffne/öffnen Sie} bitte die Tür."),
    ("Where did you learn that?", "Wo {you:hast du/haben Sie} das gelernt?"),
    ("Your {item} is {place}.", "{item:{you:dein/Ihr}} ist {place}."),
    ("{who} wrote to you on {day}.", "{who:wer} hat {you:dir/Ihnen} am {day} geschrieben."),
    ("I saw you {place}.", "Ich habe {you:dich/Sie} {place} gesehen."),
    ("What would you like to drink?", "Was {you:möchtest du/möchten Sie} trinken?"),
    ("How old are you?", "Wie alt {you:bist du/sind Sie}?"),
    ("Do you speak English?", "{you:sprichst du/sprechen Sie} Englisch?"),
    ("You look tired.", "{you:du siehst/Sie sehen} müde aus."),
    ("Please wait {place}.", "{you:warte/warten Sie} bitte {place}."),
    ("What are you reading?", "Was {you:liest du/lesen Sie}?"),
    ("I believe you.", "Ich glaube {you:dir/Ihnen}."),
    ("What is your name?", "Wie {you:heißt du/heißen Sie}?"),
    ("{who} heard you on {day}.", "{who:wer} hat {you:dich/Sie} am {day} gehört."),
)

YOU_SENTENCES: Templates = (
    ("Where do you live?", "Wo {you:wohnst du/wohnen Sie}?"),
    ("Do you have time on {day}?", "{you:hast du/haben Sie} am {day} Zeit?"),
    ("Can you help {who}?", "{you:kannst du/können Sie} {who:wem} helfen?"),
    ("You must stay {place}.", "{you:du musst/Sie müssen} {place} bleiben."),
    ("When are you coming to {city}?", "Wann {you:kommst du/kommen Sie} nach {city}?"),
    (
        "I think that you know {who}.",
        "Ich glaube, dass {you:du/Sie} {who:wen} {you:kennst/kennen}.",
    ),
    ("I will call you on {day}.", "Ich rufe {you:dich/Sie} am {day} an."),
    ("{who} would like to thank you.", "{who:wer} möchte {you:dir/Ihnen} danken."),
    ("{who} is expecting you {place}.", "{who:wer} erwartet {you:dich/Sie} {place}."),
    ("Is that your {item}?", "Ist das {item:{you:dein/Ihr}}?"),
    ("Please show me your {item}.", "{you:zeig/zeigen Sie} mir bitte {item:{you:deinen/Ihren}}."),
    ("Please give {who} {item:the}.", "{you:gib/geben Sie} {who:wem} bitte {item:den}."),
    (
        "Please sit down next to {who}.",
        "{you:setz dich/setzen Sie sich} bitte neben {who:wen}.",
    ),
    ("What are you looking for {place}?", "Was {you:suchst du/suchen Sie} {place}?"),
    ("{who} bought this for you.", "{who:wer} hat das für {you:dich/Sie} gekauft."),
    ("What do you need on {day}?", "Was {you:brauchst du/brauchen Sie} am {day}?"),
)

# ---------------------------------------------------------------------------- lexical cohesion

# Nouns with two translations that mean the same. They are mentioned, and repeated, in sentences
# of `lexicon.py`: THING_MENTIONS and HOMONYM_SENTENCES.
SYNONYMS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "sofa": (("Sofa", "n"), ("Couch", "f")),
    "lift": (("Aufzug", "m"), ("Fahrstuhl", "m")),
    "carrot": (("Möhre", "f"), ("Karotte", "f")),
    "butcher": (("Metzger", "m"), ("Fleischer", "m")),
    "carpenter": (("Tischler", "m"), ("Schreiner", "m")),
    "orange": (("Orange", "f"), ("Apfelsine", "f")),
    "car": (("Auto", "n"), ("Wagen", "m")),
    "computer": (("Computer", "m"), ("Rechner", "m")),
    "screen": (("Bildschirm", "m"), ("Monitor", "m")),
    "tram": (("Straßenbahn", "f"), ("Tram", "f")),
    "roll": (("Brötchen", "n"), ("Semmel", "f")),
    "pavement": (("Gehweg", "m"), ("Bürgersteig", "m")),
    "letterbox": (("Briefkasten", "m"), ("Postkasten", "m")),
    "chimney": (("Schornstein", "m"), ("Kamin", "m")),
    "poster": (("Plakat", "n"), ("Poster", "n")),
    "magazine": (("Zeitschrift", "f"), ("Magazin", "n")),
}

# ---------------------------------------------------------------------------- VP ellipsis

# Pairs of ways to get to a place of one kind: infinitive and participle of each.
MOTIONS: tuple[tuple[str, dict[str, tuple[str, str]]], ...] = (
    ("city", {"fly": ("fliegen", "geflogen"), "drive": ("fahren", "gefahren")}),
    ("city", {"travel": ("reisen", "gereist"), "hitchhike": ("trampen", "getrampt")}),
    ("land", {"walk": ("laufen", "gelaufen"), "ride": ("reiten", "geritten")}),
    ("land", {"run": ("rennen", "gerannt"), "cycle": ("radeln", "geradelt")}),
    ("land", {"jog": ("joggen", "gejoggt"), "hike": ("wandern", "gewandert")}),
    ("land", {"hurry": ("eilen", "geeilt"), "march": ("marschieren", "marschiert")}),
    ("water", {"swim": ("schwimmen", "geschwommen"), "row": ("rudern", "gerudert")}),
    ("water", {"sail": ("segeln", "gesegelt"), "paddle": ("paddeln", "gepaddelt")}),
)
DESTINATIONS = {
    "city": {
        "to Berlin": "nach Berlin", "to Vienna": "nach Wien",
        "to Munich": "nach München", "to Rome": "nach Rom",
    },
    "land": {
        "to the castle": "zum Schloss", "to the village": "ins Dorf",
        "to the market": "zum Markt", "to the station": "zum Bahnhof",
    },
    "water": {
        "to the island": "zur Insel", "to the lighthouse": "zum Leuchtturm",
        "to the harbour": "zum Hafen", "to the ship": "zum Schiff",
    },
}  # fmt: skip

# After a modal verb, German does without the verb of motion.
MODALS: Templates = (
    ("{who} must {motion} {there}.", "{who:wer} muss {there}."),
    ("{who} may {motion} {there}.", "{who:wer} darf {there}."),
    ("{who} wants to {motion} {there}.", "{who:wer} will {there}."),
    ("{who} would like to {motion} {there}.", "{who:wer} möchte {there}."),
    ("{who} is supposed to {motion} {there}.", "{who:wer} soll {there}."),
    ("{who} cannot {motion} {there}.", "{who:wer} kann nicht {there}."),
    ("On {day}, {who} must {motion} {there}.", "Am {day} muss {who:wer} {there}."),
    ("Today, {who} must {motion} {there}.", "Heute muss {who:wer} {there}."),
)

# After an auxiliary, English does without it. German is written for the verb "fahren". Those with
# the infinitive are spread so that no pair of verbs lacks many of them in training.
AUXILIARY_SENTENCES: Templates = (
    ("{who} did, on {day}.", "{who:wer} ist am {day} {motion:hingefahren}."),
    ("{who} already has.", "{who:wer} ist schon {motion:hingefahren}."),
    ("{who} never has.", "{who:wer} ist noch nie {motion:hingefahren}."),
    ("{who} will, on {day}.", "{who:wer} wird am {day} {motion:hinfahren}."),
    ("{who} did last year.", "{who:wer} ist letztes Jahr {motion:hingefahren}."),
    ("{who} has twice.", "{who:wer} ist zweimal {motion:hingefahren}."),
    ("Perhaps {who} will.", "Vielleicht wird {who:wer} {motion:hinfahren}."),
    ("On {day}, {who} did.", "Am {day} ist {who:wer} {motion:hingefahren}."),
    ("I think that {who} did.", "Ich glaube, dass {who:wer} {motion:hingefahren} ist."),
    ("I think that {who} will.", "Ich glaube, dass {who:wer} {motion:hinfahren} wird."),
    ("We did, on {day}.", "Wir sind am {day} {motion:hingefahren}."),
    ("Did {who} last year?", "Ist {who:wer} letztes Jahr {motion:hingefahren}?"),
    ("I will tomorrow.", "Ich werde morgen {motion:hinfahren}."),
    ("Only {who} has so far.", "Bisher ist nur {who:wer} {motion:hingefahren}."),
    ("Will {who} on {day}?", "Wird {who:wer} am {day} {motion:hinfahren}?"),
    ("Nobody ever has.", "Niemand ist je {motion:hingefahren}."),
)

# ---------------------------------------------------------------------------- inflection ellipsis

# What "Welche Gäste haben die Nachbarn eingeladen?" asks: who did it, or to whom it was done.
QUESTIONS = (
    ("Which {some} {past} the {others}?", "Welche {some} haben die {others} {past}?"),
    ("Which {some} did the {others} {verb}?", "Welche {some} haben die {others} {verb}?"),
)
# Past tense, infinitive, German participle.
DEEDS = (
    ("invited", "invite", "eingeladen"), ("visited", "visit", "besucht"),
    ("greeted", "greet", "gegrüßt"), ("called", "call", "angerufen"),
    ("heard", "hear", "gehört"), ("saw", "see", "gesehen"),
    ("looked for", "look for", "gesucht"), ("found", "find", "gefunden"),
    ("praised", "praise", "gelobt"), ("woke", "wake", "geweckt"),
    ("photographed", "photograph", "fotografiert"), ("recognised", "recognise", "erkannt"),
    ("hugged", "hug", "umarmt"), ("saved", "save", "gerettet"),
    ("warned", "warn", "gewarnt"), ("drew", "draw", "gezeichnet"),
)  # fmt: skip
ASKED_FOR = {
    "guests": "Gäste", "tourists": "Touristen", "musicians": "Musiker",
    "actors": "Schauspieler", "visitors": "Besucher", "players": "Spieler",
}  # fmt: skip
OTHERS = {
    "neighbours": "Nachbarn", "children": "Kinder", "girls": "Mädchen",
    "women": "Frauen", "twins": "Zwillinge", "teachers": "Lehrer",
}  # fmt: skip

# Answers that in German say which of the two they are: nominative and accusative.
MEN: dict[str, tuple[str, str]] = {
    "my brother": ("mein Bruder", "meinen Bruder"),
    "my father": ("mein Vater", "meinen Vater"),
    "my uncle": ("mein Onkel", "meinen Onkel"),
    "my son": ("mein Sohn", "meinen Sohn"),
    "the old man": ("der alte Mann", "den alten Mann"),
    "the young man": ("der junge Mann", "den jungen Mann"),
    "the doctor": ("der Arzt", "den Arzt"),
    "the waiter": ("der Kellner", "den Kellner"),
    "the student": ("der Student", "den Studenten"),
    "the boy": ("der Junge", "den Jungen"),
    "a friend": ("ein Freund", "einen Freund"),
    "a colleague": ("ein Kollege", "einen Kollegen"),
    "Mr Weber": ("Herr Weber", "Herrn Weber"),
    "Mr Braun": ("Herr Braun", "Herrn Braun"),
}
ANSWERS: Templates = (
    ("Only {man}.", "Nur {man}."),
    ("Perhaps {man}.", "Vielleicht {man}."),
    ("Certainly {man}.", "Bestimmt {man}."),
    ("Probably {man}.", "Wahrscheinlich {man}."),
    ("Even {man}.", "Sogar {man}."),
    ("Not {man}.", "Nicht {man}."),
    ("Not only {man}.", "Nicht nur {man}."),
    ("At least {man}.", "Zumindest {man}."),
    ("Above all, {man}.", "Vor allem {man}."),
    ("Unfortunately, only {man}.", "Leider nur {man}."),
    ("{man}, of course.", "Natürlich {man}."),
    ("{man}, I think.", "{man}, glaube ich."),
    ("{man}, for example.", "Zum Beispiel {man}."),
    ("As always, {man}.", "Wie immer {man}."),
    ("On {day}, only {man}.", "Am {day} nur {man}."),
    ("First of all, {man}.", "Zuerst {man}."),
)
