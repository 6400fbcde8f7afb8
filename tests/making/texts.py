"""A small multilingual text that the tests train tokenizers on and run models over.

It was written for these tests. It contains text that is difficult for tokenizers: capitals,
accents, composed and decomposed letters, several scripts, emoji with joiners, numbers, rare
punctuation, and blanks in unusual places.
"""

ENGLISH = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp.",
    "A story is never finished; it is only told again by another teller.",
    "She counted 1,204 ships in the harbour before the storm of 1887.",
    "Whether the weather is cold or whether the weather is hot, we walk to the market.",
    "“Don't forget the keys,” he whispered, but nobody was listening.",
    "The student learned from the teacher, and the teacher learned from the students.",
    "Nobody knew why the clock in the tower stopped at half past four.",
    "Rivers carry stones, stones carry moss, and moss carries the smell of rain.",
    "In the library they kept maps, letters, diaries and a globe without a single ocean.",
    "The naïve café owner served crème brûlée to the coöperative's employees.",
    "It's well-known that state-of-the-art machines don't understand jokes.",
    "Trains left for the north at 06:15, 09:40 and 17:55 (except on Sundays).",
)
RUSSIAN = (
    "Старый смотритель маяка каждый вечер поднимался по лестнице, чтобы зажечь лампу.",
    "История никогда не кончается: её только рассказывают заново.",
    "Она насчитала тысячу двести кораблей в гавани перед бурей 1887 года.",
    "Ученик учился у учителя, а учитель учился у своих учеников.",
    "Никто не знал, почему часы на башне остановились в половине пятого.",
    "Реки несут камни, камни несут мох, а мох несёт запах дождя.",
    "— Не забудь ключи, — прошептал он, но никто его не слушал.",
    "В библиотеке хранились карты, письма, дневники и глобус без единого океана.",
    "Ёлка стояла у окна; ёжик пил чай и читал вслух старую книгу.",
    "Поезда уходили на север утром, днём и вечером, кроме воскресенья.",
)
SLOVAK = (
    "Starý strážca majáka každý večer vystúpil po schodoch, aby zapálil lampu.",
    "Príbeh sa nikdy nekončí, iba ho niekto iný rozpráva znova.",
    "Žiak sa učil od učiteľa a učiteľ sa učil od svojich žiakov.",
    "Nikto nevedel, prečo sa hodiny na veži zastavili o pol piatej.",
    "Päťdesiat ľudí čakalo na námestí, kým prestane pršať a vyjde slnko.",
    "Vŕba, dážď, ľad, kôň, šťava, čučoriedka a ŕŕŕ.",
)
GERMAN = (
    "Der alte Leuchtturmwärter stieg jeden Abend die Treppe hinauf, um die Lampe anzuzünden.",
    "Die Donaudampfschifffahrtsgesellschaft schloss ihre Türen während des großen Sturms.",
    "Niemand wusste, warum die Uhr am Rathaus stehen geblieben war.",
    "Flüsse tragen Steine, Steine tragen Moos, und das Moos riecht nach Regen.",
)
FRENCH = (
    "Le vieux gardien du phare montait l'escalier chaque soir pour allumer la lampe.",
    "Personne ne savait pourquoi l'horloge de la tour s'était arrêtée.",
    "L'élève apprenait du maître, et le maître apprenait de ses élèves.",
    "Où est passée la clé ? Elle était là, près de la fenêtre, hier soir.",
)
OTHER = (
    "Ο παλιός φαροφύλακας ανέβαινε κάθε βράδυ τη σκάλα.",
    "老灯塔看守人每天晚上爬上楼梯点灯。没有人知道为什么。",
    "日本語の文章には空白がありません。猫が好きです。",
    "كان حارس المنارة العجوز يصعد الدرج كل مساء.",
    "दीपस्तंभ का बूढ़ा रखवाला हर शाम सीढ़ियाँ चढ़ता था।",
)
ODD = (
    "Emoji: 🙂 👍🏽 👩‍👩‍👧‍👦 🇸🇰 and ❤️ in one line.",
    "Cafe\u0301 with a combining accent, cafés with a composed one, e\u0301\u0323 with two.",
    "A\u00a0non-breaking space,\ta tab, and  two  blanks … and—dashes–too.",
    "x=1;y=[2,3];print(x**y[0]) # code, C++ and f(x)=√2·π²",
    "https://example.org/a_b?c=d%20e&f=1#top mail@example.org",
    "ﬁne ligatures, ½ cup, № 5, ½, ² and Ⅷ",
    "soft\u00adhyphen zero\u200bwidth word\u2060joiner",
    "İstanbul straße ǅ ŒUVRE",
)

SENTENCES = ENGLISH + RUSSIAN + SLOVAK + GERMAN + FRENCH + OTHER + ODD
"""Every sentence, 49 in all, none of them empty."""
