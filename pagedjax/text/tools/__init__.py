"""Tools: functions that a model may ask its caller to call, as in OpenAI's API. Nothing here calls
a function.

    definitions.py  what a request defines: tools and the choice among them, checked
    formats.py      how models write calls, and which format a chat template has
    prompt.py       tools, calls and results -> messages for a chat template
    grammar.py      tools -> the grammar of an answer
    reader.py       text -> calls, whole or piece by piece
    use.py          all of these for one request

Pure functions, except that a call gets a random id.
"""
