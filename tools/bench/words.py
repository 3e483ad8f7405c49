"""Words that are one token each, with the space in front, for the tokenizers in use today."""

_TEXT = """
the of and to in is you that it he was for on are as with his they be at one have this from or had by hot but
some what there we can out other were all your when up use word how said an each she which do their time if will
way about many then them would write like so these her long make thing see him two has look more day could go
come did my no most number who over know water than call first people may down side been now find any new work
part take get place made live where after back little only round man year came show every good me give our under
name very through just form much great think say help low line before turn cause same mean differ move right boy
old too does tell sentence set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask men change went light kind off need house picture try us
again animal point mother world near build self earth father head stand own page should country found answer
school grow study still learn plant cover food sun four thought let keep eye never last door between city tree
cross since hard start might story saw far sea draw left late run while press close night real life few stop
open seem together next white children begin got walk example
"""
WORDS = tuple(_TEXT.split())
