"""English words for keys and word lists: what RULER takes from packages that the project does not need."""

_ADJECTIVES = """
able amber ancient arctic bitter black blank blind blue bold brave brief bright broad broken bronze brown busy
calm careful cheap civil clean clear clever cloudy coarse cold common cool coral crimson crisp cruel curly curved daily
damp dark dear deep dense distant double dry dull eager early eastern easy elder empty equal exact faint fair famous
fancy fast fierce final fine firm fixed flat foreign formal former fragile fresh frozen full gentle giant glad golden
grand gray great green hidden hollow honest huge humble hungry idle inner jolly keen large late lazy light little local
lonely long loose loud loyal lucky marble mellow mild minor misty modern narrow native neat noble northern odd old
open orange outer pale patient plain pleasant polite proud purple quick quiet rapid rare raw ready recent rich rigid
ripe rough round royal rural rusty sandy scarlet secret severe shallow sharp short shy silent silver simple slim slow
small smart smooth soft solid southern spare steady steep stern still strange strict strong sunny sweet swift tall tame
tender thick thin tidy tiny tough tropical upper useful vast violet vivid warm weak wealthy western wet white whole wide
wild wise wooden yellow young
"""
_NOUNS = """
acorn actor airport album anchor angle ankle apple apron arrow artist atlas autumn bakery balcony banana barrel basket
beach beard bell bench bicycle bird biscuit blanket boat bottle bowl bracelet branch bread brick bridge broom brother
bucket button cabin cable camel camera candle canvas canyon captain carpet carrot castle cattle cave ceiling chair
chapel cherry chimney circle clock cloud coat coffee collar comet compass copper corner cottage cotton cousin cradle
crane crown curtain cushion daisy dancer desert desk dinner dragon drawer drum eagle easel elbow engine envelope fabric
falcon farmer feather fence ferry fiddle flag flame flute forest fossil fountain fox garden garlic gate ginger glacier
glove goat grape guitar hammer harbor hat hawk helmet hill honey horse hotel insect island ivory jacket jar jewel
judge jungle kettle kitchen kite knee ladder lake lamp lantern laundry lawyer leaf lemon letter library lion lizard
lobster locket lumber machine magnet mango map market meadow melon mirror monkey moon morning motor mountain mouse
museum mushroom needle nest nurse oasis ocean office olive onion orchard otter oven owl paddle painter palace panther
paper parrot pasture peach pearl pebble pencil pepper piano pigeon pillow pilot planet plate pocket pond pony porch
potato prairie puzzle rabbit radio raft railway rain ribbon river road robin rocket roof rope saddle sailor salmon
sandal saucer scarf school sculptor shadow shelter shirt shovel sister sleeve snow soldier sparrow spider spoon spring
stable staircase statue stone stove stream summer sweater table tailor teacher temple tent theater thunder tiger tomato
tower tractor train tree trumpet tulip tunnel turtle umbrella valley vase village violin wagon waiter wallet walnut
water weaver whale wheel whistle window winter wolf zebra
"""
_VERBS = """
admire agree allow answer appear arrive ask bake balance become begin behave believe belong borrow bring build burn
carry catch celebrate change choose climb close collect compare complain consider copy cough count cover create cross
dance decide deliver describe discover divide draw dream drink drive earn eat enjoy enter escape examine expect explain
explore fall feed fetch find finish float follow forget forgive gather give glance greet grow guess guide happen hear
hide hope hunt imagine improve include invent invite jump knock laugh learn leave lend lift listen manage measure
mention move notice obey observe offer paint perform plant practice prefer prepare pretend promise protect prove provide
publish receive refuse remain remember repair repeat replace rescue return sail search seem settle share shout sing sit
skate sleep smile solve speak spell stand stay suggest swim teach thank think travel trust try understand visit wait
walk wander wash watch whisper wonder write
"""

ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()

PAIRS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
"""Names such as `amber-acorn`, all different: keys of needles."""

WORDS = [*dict.fromkeys([*ADJECTIVES, *NOUNS, *_VERBS.split()]), *PAIRS]
"""All different: single words first, then pairs."""

SINGLE_WORDS = len(WORDS) - len(PAIRS)
"""How many of `WORDS` are single words."""
