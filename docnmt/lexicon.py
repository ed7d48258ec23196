"""Words and sentence templates of the bundled English-German document grammar.

Tables only; `grammar.py` says how they are put together and docs/demo_corpus.md how to read
them. A template is an English and a German sentence with the same slots. In German, what is
written behind the colon is the form for a masculine noun ("{thing:einen}", "{it:er}") or for
the informal singular ("{you:hast}"); the grammar replaces it by the form that agrees.
"""

Templates = tuple[tuple[str, str], ...]

# ---------------------------------------------------------------------------- words

THINGS: dict[str, dict[str, str]] = {
    "m": {
        "suitcase": "Koffer", "key": "Schlüssel", "coat": "Mantel", "hat": "Hut",
        "ring": "Ring", "table": "Tisch", "chair": "Stuhl", "carpet": "Teppich",
        "mirror": "Spiegel", "ball": "Ball", "umbrella": "Regenschirm", "backpack": "Rucksack",
        "scarf": "Schal", "spoon": "Löffel", "pot": "Topf", "plate": "Teller",
        "computer": "Computer", "printer": "Drucker", "sweater": "Pullover", "basket": "Korb",
        "armchair": "Sessel", "calendar": "Kalender", "hammer": "Hammer", "bucket": "Eimer",
    },
    "f": {
        "lamp": "Lampe", "clock": "Uhr", "bag": "Tasche", "cup": "Tasse",
        "bottle": "Flasche", "camera": "Kamera", "guitar": "Gitarre", "jacket": "Jacke",
        "cap": "Mütze", "necklace": "Kette", "fork": "Gabel", "bowl": "Schüssel",
        "pan": "Pfanne", "vase": "Vase", "blanket": "Decke", "candle": "Kerze",
        "map": "Karte", "newspaper": "Zeitung", "brush": "Bürste", "blouse": "Bluse",
        "flute": "Flöte", "ladder": "Leiter", "doll": "Puppe", "drum": "Trommel",
    },
    "n": {
        "book": "Buch", "picture": "Bild", "knife": "Messer", "glass": "Glas",
        "dress": "Kleid", "shirt": "Hemd", "bicycle": "Fahrrad", "sofa": "Sofa",
        "bed": "Bett", "radio": "Radio", "telephone": "Telefon", "pillow": "Kissen",
        "notebook": "Heft", "towel": "Handtuch", "piano": "Klavier", "shelf": "Regal",
        "tent": "Zelt", "tray": "Tablett", "rope": "Seil", "bracelet": "Armband",
        "album": "Album", "dictionary": "Wörterbuch", "sign": "Schild", "net": "Netz",
    },
}  # fmt: skip

ATTRIBUTES = {"small": "klein", "big": "groß", "red": "rot"}
LOOKS = {"old": "alt", "new": "neu", "beautiful": "schön", "expensive": "teuer", "cheap": "billig"}
NUMBERS = {"ten": "zehn", "twelve": "zwölf", "fifteen": "fünfzehn", "twenty": "zwanzig"}
DAYS = {"Monday": "Montag", "Tuesday": "Dienstag", "Friday": "Freitag", "Sunday": "Sonntag"}
CITIES = {"Berlin": "Berlin", "Vienna": "Wien", "Munich": "München", "Rome": "Rom"}
DRINKS = {"tea": "Tee", "coffee": "Kaffee", "water": "Wasser"}
PLACES = {
    "in the garden": "im Garten",
    "in the office": "im Büro",
    "in the cellar": "im Keller",
    "in the hotel": "im Hotel",
    "at the station": "am Bahnhof",
}

# People that are talked about; none of them is talked to (below).
NAMES = ("Anna", "Peter", "Laura", "Thomas", "Sarah", "Martin")
KIN = {
    "my brother": ("Bruder", "m"),
    "my sister": ("Schwester", "f"),
    "my father": ("Vater", "m"),
    "my mother": ("Mutter", "f"),
}

# ---------------------------------------------------------------------------- pronoun

THING_MENTIONS: Templates = (
    ("Here is {thing:the}.", "Hier ist {thing:der}."),
    ("Where is {thing:the}?", "Wo ist {thing:der}?"),
    ("This is {thing:a}.", "Das ist {thing:ein}."),
    ("Only {thing:a} is missing.", "Nur {thing:ein} fehlt."),
    ("{who} is looking for {thing:the}.", "{who:wer} sucht {thing:den}."),
    ("{who} showed me {thing:a}.", "{who:wer} hat mir {thing:einen} gezeigt."),
    ("We talked about {thing:the} again.", "Wir haben wieder über {thing:den} gesprochen."),
    ("What happened to {thing:the}?", "Was ist mit {thing:dem} passiert?"),
    ("{who} asked about {thing:the}.", "{who:wer} hat nach {thing:dem} gefragt."),
)

# One verb each, and none of the verbs that mention the thing.
IT_SENTENCES: Templates = (
    ("It looks very {look}.", "{it:er} sieht sehr {look} aus."),
    ("It belongs to {who}.", "{it:er} gehört {who:wem}."),
    ("It cost {number} euros.", "{it:er} hat {number} Euro gekostet."),
    ("It disappeared on {day}.", "{it:er} ist am {day} verschwunden."),
    ("It comes from {city}.", "{it:er} kommt aus {city}."),
    ("It reminds {who} of {city}.", "{it:er} erinnert {who:wen} an {city}."),
    ("On {day}, it was {place}.", "Am {day} war {it:er} {place}."),
    (
        "I think that it will please {who}.",
        "Ich glaube, dass {it:er} {who:wem} gefallen wird.",
    ),
    ("{who} likes it very much.", "{who:wer} mag {it:ihn} sehr."),
    ("We need it on {day}.", "Wir brauchen {it:ihn} am {day}."),
    ("Tomorrow, I will give it to {who}.", "Morgen gebe ich {it:ihn} {who:wem}."),
    ("{who} found it {place}.", "{who:wer} hat {it:ihn} {place} gefunden."),
    ("{who} wants to sell it in {city}.", "{who:wer} will {it:ihn} in {city} verkaufen."),
    ("We have had it for {number} years.", "Wir haben {it:ihn} seit {number} Jahren."),
    ("Did {who} bring it from {city}?", "Hat {who:wer} {it:ihn} aus {city} mitgebracht?"),
    ("{who} hid it {place}.", "{who:wer} hat {it:ihn} {place} versteckt."),
)

# ---------------------------------------------------------------------------- address

# Who is spoken to, by the German form of address.
ADDRESSEES: dict[str, dict[str, str]] = {
    "du": {
        "Mia": "Mia", "Ben": "Ben", "Emma": "Emma", "Paul": "Paul",
        "Lena": "Lena", "Max": "Max", "Clara": "Clara", "Tim": "Tim",
        "Julia": "Julia", "Felix": "Felix", "Nora": "Nora", "Jonas": "Jonas",
        "Mum": "Mama", "Dad": "Papa", "Grandma": "Oma", "Grandpa": "Opa",
    },
    "ihr": {
        "children": "Kinder", "boys": "Jungs", "girls": "Mädels", "friends": "Freunde",
        "Mia and Ben": "Mia und Ben", "Emma and Paul": "Emma und Paul",
        "Lena and Max": "Lena und Max", "Clara and Tim": "Clara und Tim",
        "Julia and Felix": "Julia und Felix", "Nora and Jonas": "Nora und Jonas",
        "Ben and Emma": "Ben und Emma", "Paul and Lena": "Paul und Lena",
        "Max and Julia": "Max und Julia", "Tim and Nora": "Tim und Nora",
        "Mum and Dad": "Mama und Papa", "Grandma and Grandpa": "Oma und Opa",
    },
    "Sie": {
        "Mr Keller": "Herr Keller", "Mr Weber": "Herr Weber",
        "Mr Braun": "Herr Braun", "Mr Vogel": "Herr Vogel",
        "Mrs Keller": "Frau Keller", "Mrs Weber": "Frau Weber",
        "Mrs Braun": "Frau Braun", "Mrs Vogel": "Frau Vogel",
        "Professor Keller": "Professor Keller", "Professor Weber": "Professor Weber",
        "Professor Braun": "Professor Braun", "Professor Vogel": "Professor Vogel",
        "Mr and Mrs Keller": "Herr und Frau Keller", "Mr and Mrs Weber": "Herr und Frau Weber",
        "Mr and Mrs Braun": "Herr und Frau Braun", "Mr and Mrs Vogel": "Herr und Frau Vogel",
    },
}  # fmt: skip

GREETINGS: Templates = (
    ("Good morning, {addressee}.", "Guten Morgen, {addressee}."),
    ("Good evening, {addressee}.", "Guten Abend, {addressee}."),
    ("Hello, {addressee}.", "Hallo, {addressee}."),
    ("Welcome, {addressee}.", "Willkommen, {addressee}."),
    ("Many thanks, {addressee}.", "Vielen Dank, {addressee}."),
    ("One moment, {addressee}.", "Einen Moment, {addressee}."),
    ("Excuse me, {addressee}.", "Entschuldigung, {addressee}."),
    ("I have a question, {addressee}.", "Ich habe eine Frage, {addressee}."),
)

YOU_SENTENCES: Templates = (
    ("Where do you live?", "Wo {you:wohnst} {you:du}?"),
    ("Do you have time on {day}?", "{you:hast} {you:du} am {day} Zeit?"),
    ("Can you help {who}?", "{you:kannst} {you:du} {who:wem} helfen?"),
    ("Would you like some {drink}?", "{you:möchtest} {you:du} etwas {drink}?"),
    ("You must wait {place}.", "{you:du} {you:musst} {place} warten."),
    ("When are you coming to {city}?", "Wann {you:kommst} {you:du} nach {city}?"),
    ("I think that you know {who}.", "Ich glaube, dass {you:du} {who:wen} {you:kennst}."),
    ("How long are you staying in {city}?", "Wie lange {you:bleibst} {you:du} in {city}?"),
    ("{who} saw you in {city}.", "{who:wer} hat {you:dich} in {city} gesehen."),
    ("I will call you on {day}.", "Ich rufe {you:dich} am {day} an."),
    ("{who} would like to thank you.", "{who:wer} möchte {you:dir} danken."),
    ("{who} is expecting you {place}.", "{who:wer} erwartet {you:dich} {place}."),
    ("Is that your {item}?", "Ist das {item:{you:dein}}?"),
    ("Please show me your {item}.", "{you:zeig} mir bitte {item:{you:deinen}}."),
    ("Please give {who} your {item}.", "{you:gib} {who:wem} bitte {item:{you:deinen}}."),
    ("Please sit down next to {who}.", "{you:setz dich} bitte neben {who:wen}."),
)

# How a word of those sentences reads for du, ihr and Sie, found by its form for du.
ADDRESS_FORMS: dict[str, tuple[str, str, str]] = {
    "du": ("du", "ihr", "Sie"),
    "dich": ("dich", "euch", "Sie"),
    "dir": ("dir", "euch", "Ihnen"),
    "dein": ("dein", "euer", "Ihr"),
    "deinen": ("deinen", "euren", "Ihren"),
    "bleibst": ("bleibst", "bleibt", "bleiben"),
    "hast": ("hast", "habt", "haben"),
    "kannst": ("kannst", "könnt", "können"),
    "kennst": ("kennst", "kennt", "kennen"),
    "kommst": ("kommst", "kommt", "kommen"),
    "musst": ("musst", "müsst", "müssen"),
    "möchtest": ("möchtest", "möchtet", "möchten"),
    "wohnst": ("wohnst", "wohnt", "wohnen"),
    "gib": ("gib", "gebt", "geben Sie"),
    "setz dich": ("setz dich", "setzt euch", "setzen Sie sich"),
    "zeig": ("zeig", "zeigt", "zeigen Sie"),
}

# ---------------------------------------------------------------------------- repetition

# English nouns with two German renderings; for each, four sentences that leave one of them.
HOMONYMS: dict[str, dict[tuple[str, str], Templates]] = {
    "bank": {
        ("Bank", "f"): (
            ("{who} has an account at the bank.", "{who:wer} hat ein Konto bei der Bank."),
            ("{who} took the money to the bank.", "{who:wer} hat das Geld zur Bank gebracht."),
            ("The bank lent {who} some money.", "Die Bank hat {who:wem} Geld geliehen."),
            ("{who} works for the bank.", "{who:wer} arbeitet für die Bank."),
        ),
        ("Ufer", "n"): (
            ("{who} sat on the bank of the river.", "{who:wer} saß am Ufer des Flusses."),
            ("A boat lay at the bank.", "Ein Boot lag am Ufer."),
            ("{who} swam to the bank.", "{who:wer} ist ans Ufer geschwommen."),
            ("Ducks were sleeping on the bank.", "Enten schliefen am Ufer."),
        ),
    },
    "crane": {
        ("Kran", "m"): (
            ("A crane lifted the stones.", "Ein Kran hob die Steine."),
            ("The workers repaired the crane.", "Die Arbeiter haben den Kran repariert."),
            ("A crane stood on the building site.", "Auf der Baustelle stand ein Kran."),
            ("The crane is made of steel.", "Der Kran ist aus Stahl."),
        ),
        ("Kranich", "m"): (
            ("The crane caught a fish.", "Der Kranich hat einen Fisch gefangen."),
            ("A crane flew across the lake.", "Ein Kranich flog über den See."),
            ("{who} fed a crane at the zoo.", "{who:wer} hat im Zoo einen Kranich gefüttert."),
            ("The crane has a nest.", "Der Kranich hat ein Nest."),
        ),
    },
    "bat": {
        ("Fledermaus", "f"): (
            ("A bat flew across the lake.", "Eine Fledermaus flog über den See."),
            ("The bat sleeps in a cave.", "Die Fledermaus schläft in einer Höhle."),
            ("The bat eats insects.", "Die Fledermaus frisst Insekten."),
            ("{who} fed a bat at the zoo.", "{who:wer} hat im Zoo eine Fledermaus gefüttert."),
        ),
        ("Schläger", "m"): (
            (
                "{who} hit the ball with the bat.",
                "{who:wer} hat den Ball mit dem Schläger getroffen.",
            ),
            ("The bat is made of wood.", "Der Schläger ist aus Holz."),
            ("The player broke the bat.", "Der Spieler hat den Schläger zerbrochen."),
            ("The team bought a bat.", "Die Mannschaft hat einen Schläger gekauft."),
        ),
    },
    "seal": {
        ("Robbe", "f"): (
            ("The seal caught a fish.", "Die Robbe hat einen Fisch gefangen."),
            ("{who} fed a seal at the zoo.", "{who:wer} hat im Zoo eine Robbe gefüttert."),
            ("The seal swam in the sea.", "Die Robbe schwamm im Meer."),
            ("A seal was sleeping on the beach.", "Eine Robbe schlief am Strand."),
        ),
        ("Siegel", "n"): (
            ("The seal is made of wax.", "Das Siegel ist aus Wachs."),
            ("The letter has a seal.", "Der Brief hat ein Siegel."),
            ("The king broke the seal.", "Der König hat das Siegel gebrochen."),
            ("A seal is missing from the document.", "Auf der Urkunde fehlt ein Siegel."),
        ),
    },
    "plant": {
        ("Pflanze", "f"): (
            ("{who} waters the plant every day.", "{who:wer} gießt die Pflanze jeden Tag."),
            ("The plant needs a lot of sun.", "Die Pflanze braucht viel Sonne."),
            ("The plant has yellow flowers.", "Die Pflanze hat gelbe Blüten."),
            ("The plant grows in a pot.", "Die Pflanze wächst in einem Topf."),
        ),
        ("Fabrik", "f"): (
            ("The plant produces steel.", "Die Fabrik produziert Stahl."),
            ("The workers left the plant.", "Die Arbeiter haben die Fabrik verlassen."),
            ("The plant makes cars.", "Die Fabrik baut Autos."),
            ("The boss closed the plant.", "Der Chef hat die Fabrik geschlossen."),
        ),
    },
    "coach": {
        ("Trainer", "m"): (
            ("The coach praised the player.", "Der Trainer hat den Spieler gelobt."),
            ("The team has a coach.", "Die Mannschaft hat einen Trainer."),
            ("The coach was angry with the team.", "Der Trainer war wütend auf die Mannschaft."),
            ("The coach wants to win.", "Der Trainer will gewinnen."),
        ),
        ("Reisebus", "m"): (
            ("The coach is full of tourists.", "Der Reisebus ist voller Touristen."),
            ("The coach has fifty seats.", "Der Reisebus hat fünfzig Plätze."),
            ("The driver washed the coach.", "Der Fahrer hat den Reisebus gewaschen."),
            ("The engine of the coach is old.", "Der Motor des Reisebusses ist alt."),
        ),
    },
    "pipe": {
        ("Pfeife", "f"): (
            ("{who} smokes a pipe.", "{who:wer} raucht eine Pfeife."),
            ("There is tobacco in the pipe.", "In der Pfeife ist Tabak."),
            ("{who} lit the pipe.", "{who:wer} hat die Pfeife angezündet."),
            ("The old man filled the pipe.", "Der alte Mann hat die Pfeife gestopft."),
        ),
        ("Rohr", "n"): (
            ("Water is running through the pipe.", "Durch das Rohr läuft Wasser."),
            ("The pipe is made of steel.", "Das Rohr ist aus Stahl."),
            ("The workers repaired the pipe.", "Die Arbeiter haben das Rohr repariert."),
            ("There is a pipe in the wall.", "In der Wand ist ein Rohr."),
        ),
    },
    "bow": {
        ("Bogen", "m"): (
            ("The hunter has a bow and an arrow.", "Der Jäger hat einen Bogen und einen Pfeil."),
            ("The bow is made of wood.", "Der Bogen ist aus Holz."),
            (
                "{who} shot an arrow with the bow.",
                "{who:wer} hat mit dem Bogen einen Pfeil geschossen.",
            ),
            ("The soldier carried a bow.", "Der Soldat trug einen Bogen."),
        ),
        ("Schleife", "f"): (
            ("The girl has a bow in her hair.", "Das Mädchen hat eine Schleife im Haar."),
            ("There is a bow on the present.", "Auf dem Geschenk ist eine Schleife."),
            ("{who} tied a bow.", "{who:wer} hat eine Schleife gebunden."),
            ("The bow is made of silk.", "Die Schleife ist aus Seide."),
        ),
    },
}

HOMONYM_SENTENCES: Templates = (
    ("{who} often talks about {it:the}.", "{who:wer} spricht oft über {it:den}."),
    ("{who} remembers {it:the} very well.", "{who:wer} erinnert sich sehr gut an {it:den}."),
    ("Here is a photo of {it:the}.", "Hier ist ein Foto von {it:dem}."),
    ("{who} would like to see {it:the}, too.", "{who:wer} möchte {it:den} auch sehen."),
    ("We will never forget {it:the}.", "Wir werden {it:den} nie vergessen."),
    ("{who} described {it:the} to me.", "{who:wer} hat mir {it:den} beschrieben."),
    ("{who} dreamed of {it:the}.", "{who:wer} hat von {it:dem} geträumt."),
    ("What do we know about {it:the}?", "Was wissen wir über {it:den}?"),
    ("{who} photographed {it:the}.", "{who:wer} hat {it:den} fotografiert."),
    ("{it:the} surprised us all.", "{it:der} hat uns alle überrascht."),
    ("{it:the} is famous in {city}.", "{it:der} ist in {city} berühmt."),
    ("Did {who} notice {it:the}?", "Hat {who:wer} {it:den} bemerkt?"),
    ("{who} drew {it:the} on {day}.", "{who:wer} hat {it:den} am {day} gezeichnet."),
    (
        "{who} wrote a story about {it:the}.",
        "{who:wer} hat eine Geschichte über {it:den} geschrieben.",
    ),
    ("Did everybody like {it:the}?", "Hat {it:der} allen gefallen?"),
    ("I was thinking of {it:the} on {day}.", "Am {day} habe ich an {it:den} gedacht."),
)

# ---------------------------------------------------------------------------- scenes

# Opening and closing sentences of a shop, a house, an office, a trip.
SCENES: tuple[tuple[Templates, Templates], ...] = (
    (
        (
            (
                "{who} works in a shop in {city}.",
                "{who:wer} arbeitet in einem Geschäft in {city}.",
            ),
            ("The shop in {city} opens on {day}.", "Das Geschäft in {city} öffnet am {day}."),
        ),
        (
            ("In the evening, the shop was empty.", "Am Abend war das Geschäft leer."),
            ("The customers were happy.", "Die Kunden waren zufrieden."),
        ),
    ),
    (
        (
            ("{who} has a house in {city}.", "{who:wer} hat ein Haus in {city}."),
            ("On {day}, the family met in {city}.", "Am {day} traf sich die Familie in {city}."),
        ),
        (
            ("In the evening, everybody was tired.", "Am Abend waren alle müde."),
            ("Then we ate together.", "Dann haben wir zusammen gegessen."),
        ),
    ),
    (
        (
            (
                "There was a lot of work in the office on {day}.",
                "Am {day} gab es im Büro viel Arbeit.",
            ),
            ("{who} has a new job in {city}.", "{who:wer} hat eine neue Stelle in {city}."),
        ),
        (
            ("At last, the work was done.", "Endlich war die Arbeit fertig."),
            ("On {day}, the office is closed.", "Am {day} ist das Büro geschlossen."),
        ),
    ),
    (
        (
            ("On {day}, we went to {city}.", "Am {day} sind wir nach {city} gefahren."),
            ("The train to {city} was late.", "Der Zug nach {city} hatte Verspätung."),
        ),
        (
            ("At last, we arrived in {city}.", "Endlich kamen wir in {city} an."),
            ("The trip was long, but nice.", "Die Reise war lang, aber schön."),
        ),
    ),
)

ASIDES: Templates = (
    (
        "{thing:the} and {item:the} are for {who}.",
        "{thing:der} und {item:der} sind für {who:wen}.",
    ),
    ("{thing:the} and {item:the} are {look}.", "{thing:der} und {item:der} sind {look}."),
    ("We paid for {thing:the} and {item:the}.", "Wir haben {thing:den} und {item:den} bezahlt."),
    (
        "{who} came with {thing:a} and {item:a}.",
        "{who:wer} kam mit {thing:einem} und {item:einem}.",
    ),
)
