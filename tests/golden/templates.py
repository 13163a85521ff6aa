"""Renders a table of expressions and statements with Jinja 2 as transformers configures it, and writes templates.json.

    python tests/golden/templates.py        (transformers 5, jinja2 3.1.6)

Each line of EXPRESSIONS is put between {{ and }}; each line of STATEMENTS is a template, in which ¶ is a line end. An
entry of the JSON file is [template, text], or [template, null] if Jinja rejects it. The engine of the program renders
both kinds with the same variables, so a difference between the two engines fails its test.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = pathlib.Path(__file__)
OUT = HERE.with_name("templates.json")

VARIABLES = {
    "path": "a/b/a", "name": "hello wORLD", "blank": "", "digits": "42", "padded": "  x y  ",
    "lines": "a\nb\r\nc\n", "wide": "Größe ÄÖ 日本", "quote": "it's \"so\"\n\t\\",
    "n": 7, "minus": -3, "half": 2.5, "whole": 3.0, "big": 1e16, "small": 1e-7, "yes": True, "no": False,
    "nothing": None, "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "void": [], "none_of": {},
    "mixed": [1, "a", None, 2.5, True, {"k": [1, "x"]}], "table": {"b": 1, "a": {"x": [1, 2]}, "C": None},
    "rows": [{"role": "user", "n": 2, "text": "x"}, {"role": "tool", "n": 1, "text": "y"}, {"role": "user", "n": 3}],
    "tool": {"name": "f", "parameters": {"type": "object", "properties": {"ö": {"type": "string", "max": 1.0}}}},
}

EXPRESSIONS = r"""
path.removeprefix('a/')
path.removeprefix('x')
path.removesuffix('/a')
path.removesuffix('')
path.rsplit('/', 1)
path.rsplit('/')
path.split('/')
path.split('/', 1)
path.split('/', maxsplit=1)
path.split(sep='/')
padded.split()
padded.rsplit()
padded.split(' ')
padded.split(None, 1)
padded.rsplit(None, 1)
path.split('')
path.partition('/')
path.partition('x')
path.rpartition('/')
path.rpartition('x')
path.partition('/')[2]
path.index('b')
path.index('x')
path.rindex('a')
path.find('a', 1)
path.find('x')
path.rfind('a')
path.find('a', 1, 3)
path.count('a')
path.count('a', 1)
path.count('')
path.replace('a', 'x')
path.replace('a', 'x', 1)
path.replace('', '-')
path.replace('', '-', 2)
path.replace('a', 'x', count=1)
path.replace('a', 'x', -1)
path.startswith('a')
path.startswith('b', 2)
path.startswith(('x', 'a/'))
path.startswith(['a'])
path.endswith('a')
path.endswith(('b', 'a'))
path.endswith('b', 0, 3)
path.startswith('')
digits.zfill(5)
'-42'.zfill(5)
'+4'.zfill(4)
digits.zfill(1)
path.ljust(8) ~ '|'
path.rjust(8, '.')
path.center(8, '*')
path.center(10, '*')
'ab'.center(5, '*')
'abc'.center(6, '*')
path.ljust(3)
path.ljust(8, 'xy')
name.swapcase()
name.casefold()
'Straße'.casefold()
name.title()
"it's a 2nd-try x_y".title()
name.capitalize()
name.upper()
wide.lower()
wide.upper()
'ß'.upper()
'a\tb\tcd'.expandtabs(4)
'a\tb'.expandtabs()
lines.splitlines()
lines.splitlines(true)
lines.splitlines(keepends=True)
blank.splitlines()
'a\x0bb\x0cc\u2028d'.splitlines()
padded.strip()
padded.strip() | length
padded.lstrip() ~ '|'
padded.rstrip() ~ '|'
'xxaxx'.strip('x')
'xyaxy'.lstrip('yx')
'xyaxy'.rstrip('xy')
padded.strip(None)
digits.isdigit()
'4²'.isdigit()
'4½'.isnumeric()
'42'.isdecimal()
'4²'.isdecimal()
blank.isdigit()
'ab1'.isalnum()
'ab'.isalpha()
blank.isalpha()
'a b'.isalpha()
' \n'.isspace()
blank.isspace()
'aB'.islower()
'ab1'.islower()
'AB 1'.isupper()
'1'.isupper()
'Ab Cd'.istitle()
'Ab cd'.istitle()
'a_1'.isidentifier()
'1a'.isidentifier()
'ab'.isascii()
wide.isascii()
'a\n'.isprintable()
'ab'.isprintable()
'-'.join(words)
'-'.join(list)
'-'.join('abc')
', '.join(table)
'-'.join(void)
'{} and {}'.format(1, 'x')
'{0}-{1}-{0}'.format('a', 'b')
'{x:>5}|{y:<4}|{z:^5}|'.format(x=1, y='ab', z='c')
'{:.2f} {:05d} {:,} {:x} {:e} {:%}'.format(3.14159, 42, 1234567, 255, 12345.678, 0.25)
'{:+} {!r} {!s}'.format(5, 'q', none)
'{{}}{}'.format(1)
'{a[k]} {b.real}'.format(a={'k': 1}, b=2)
'{}'.format(half)
'{}'.format([1, 'a'])
'{}'.format()
'%s has %d' % (name, n)
'%s' % name
'%s' % n
'%s' % (nothing,)
'%.2f' % half
'%5d|%-5d|%05d' % (n, n, n)
'%x %X %o' % (255, 255, 8)
'%r' % name
'%s' % list
'%s' % [1, 'a']
'%(a)s-%(b)d' % {'a': 'x', 'b': 2}
'100%%' % ()
'%e %g %G' % (half, 1e20, 0.0001)
'%c%c' % ('a', 98)
'%s %s' % (1,)
'%d' % 'x'
'%d' % 2.9
'%i%%' % 50
'%+d % d' % (3, 3)
'%5s|%-5s|' % ('ab', 'ab')
'%.1s' % 'ab'
'%s' % yes
'a%sb' % 'x' ~ 'c'
'%s' % 'a' + 'b'
7 % 3
-7 % 3
7 % -3
7.5 % 2
n % 2 == 1
n * 2 % 4
2 + n % 4 * 3
7 % 0
7 / 2
6 / 2
7 // 2
-7 // 2
7.0 // 2
1 / 0
2 ** 10
2 ** -1
2 ** 0.5
-2 ** 2
2 ** 3 ** 2
1 + 2.0
1.0
100.0
1e16
1e15
123456789012345680.0
0.1 + 0.2
1e-5
0.0001
big
small
whole
half
-0.0
1_000
0x1f
0b11
0o17
1e3
.5 | default(1)
5 | float
3 - 5
-n
+n
not n
- (n)
yes + 1
true
false
none
True
False
None
nothing
undefined_name
undefined_name.x
undefined_name | length
undefined_name | list
undefined_name | join
undefined_name | string
undefined_name is iterable
undefined_name ~ 'x'
undefined_name + 1
undefined_name == undefined_name
undefined_name is none
table.missing is defined
table.missing
table.missing.deeper
table['missing']
table.missing | length
table.missing | default('d')
table.missing or 'd'
not table.missing
'x' in table.missing
nothing ~ 'x'
nothing | length
nothing | string
nothing | upper
nothing | trim
nothing | default('d')
nothing | default('d', true)
nothing | list
nothing | join
nothing | int
nothing | tojson
nothing is iterable
nothing is sequence
nothing is mapping
nothing is defined
nothing is none
nothing == none
nothing.x
nothing.x.y
nothing['x']
nothing + 'x'
'x' in nothing
nothing < 1
nothing and 1
nothing or 1
blank or 'other'
void or 'other'
n and 'x'
0 or none
yes and no
n == 7.0
'7' == 7
true == 1
1 < 2 < 3
1 < 3 < 2
1 < 2 > 1
1 == 1 == 1
1 < 'a'
'a' < 'b'
[1, 2] < [1, 3]
list == [3, 1, 2]
(1, 2) == [1, 2]
table == {'b': 1}
1 in list
9 not in list
'b' in table
'k' not in table
'ell' in name
1 in '123'
'x' in path
not 'x' in path
none in mixed
'a' in ('a', 'b')
2 in (1, 2)
'ab' * 3
3 * 'ab'
'ab' * 0
'ab' * -1
[0] * 3
void * 2
(1, 2) * 2
'a' + 'b'
'a' + 1
1 + 'a'
[1] + [2]
list + [4]
(1,) + (2,)
[1] + (2,)
{} + {}
'a' ~ 1 ~ none ~ true ~ 1.0 ~ [1, 'a'] ~ {'k': 'v'}
list
words
mixed
table
rows
void
none_of
[quote]
{'k': quote}
quote
[wide]
['\x01', '\u200b', '\x7f', 'é']
["it's", 'q"q', "b'\"b"]
(1,)
(1, 'a')
()
[true, none, 1.5]
{1: 'a', none: 'b', true: 'c'}
{'a': (1, 2)}
[[], {}, ()]
1 if yes else 2
1 if no
'x' if no is defined and no else 'y'
[1, 2, 3][0]
list[-1]
list[5]
list[0:2]
list[1:]
list[:-1]
list[-2:]
list[::-1]
list[::2]
list[5:]
list[-9:2]
[1, 2, 3, 4, 5][3:0:-1]
[1, 2, 3, 4, 5][-1:-4:-1]
[1, 2, 3, 4, 5][::-2]
[1, 2, 3, 4, 5][2::-1]
[1, 2, 3, 4, 5][:1:-1]
[1, 2, 3, 4, 5][:-3:-1]
[1, 2, 3, 4, 5][9::-1]
[1, 2, 3, 4, 5][1:3:-1]
name[0]
name[-1]
name[::-1]
name[1:4]
name[-3:]
name[3:1:-1]
name[50:]
wide[4:6]
(1, 2, 3)[1:]
(1, 2, 3)[::-1]
list[1:2:0]
table['a']['x'][0]
table.a.x.1
table.a.x[1]
table['a'].x
table.get('b')
table.get('z')
table.get('z', 'd')
table.get('C', 'd')
table.keys() | list
table.values() | list
table.items() | list
table.keys()
table.values()
table.items()
table | items | list
table.copy()
table.pop('b')
table.update({'x': 1})
table.setdefault('x', 1)
list.append(1)
list.index(2)
list.index(9)
list.count(1)
list.copy()
list.sort()
list.pop()
list.insert(0, 1)
list.reverse()
(1, 2, 1).count(1)
(1, 2).index(2)
name.nothing
name.nothing is defined
name.nothing()
n.x
list.x
list | first
list | last
void | first
void | last
void | first is defined
list | length
name | length
table | length
n | length
list | count
list | sum
void | sum
rows | sum('n')
rows | sum(attribute='n')
list | sum(start=10)
list | min
list | max
words | min
words | max(case_sensitive=true)
void | max
list | sort
list | sort(reverse=true)
words | sort
words | sort(case_sensitive=true)
words | sort(true)
rows | sort(attribute='n') | map(attribute='n') | list
rows | sort(attribute='role,n') | map(attribute='n') | list
mixed | sort
list | reverse | list
name | reverse
list | join
list | join(', ')
words | join('|')
rows | join(',', attribute='n')
rows | map(attribute='n') | join('+')
rows | map(attribute='text', default='-') | list
rows | map(attribute='text') | list
words | map('upper') | list
words | map('upper') | join
words | map('replace', 'a', 'x') | list
words | map('length') | sum
rows | map('tojson') | join
rows | selectattr('role', 'equalto', 'user') | list | length
rows | selectattr('text') | list | length
rows | selectattr('text', 'defined') | map(attribute='text') | list
rows | selectattr('n', '>', 1) | map(attribute='n') | list
rows | selectattr('n', 'in', [1, 2]) | map(attribute='n') | list
rows | selectattr('role', 'eq', 'tool') | first
rows | selectattr('role', '==', 'nobody') | list
rows | rejectattr('role', 'equalto', 'user') | map(attribute='n') | list
rows | rejectattr('text', 'undefined') | list | length
list | select('odd') | list
list | select('>', 1) | list
list | select | list
list | reject('odd') | list
mixed | select('string') | list
mixed | reject('none') | list
mixed | select('number') | list
rows | groupby('role') | list
rows | groupby('role') | map(attribute='grouper') | list
rows | groupby('role') | map('first') | list
rows | groupby('text', default='-') | length
list | batch(2) | list
list | batch(2, 0) | list
list | slice(2) | list
[1, 2, 3, 4, 5] | slice(3) | list
[1, 2, 3, 4, 5] | slice(3, 'x') | list
words | unique | list
['a', 'A', 'b', 'a'] | unique | list
['a', 'A'] | unique(case_sensitive=true) | list
rows | unique(attribute='role') | map(attribute='n') | list
name | list
table | list
n | list
range(3) | list
range(1, 7, 2) | list
range(3, 0, -1) | list
range(3)
range(0) | list
range(3) | length
range(2)[1]
table | dictsort
table | dictsort(case_sensitive=true)
{'x': 2, 'y': 1} | dictsort(by='value')
{'x': 2, 'y': 1} | dictsort(false, 'value', true)
'42' | int
'4.7' | int
4.7 | int
-4.7 | int
'x' | int
'x' | int(5)
'x' | int(default=5)
'0x1f' | int(base=16)
'ff' | int(0, 16)
'1_0' | int
' 7 ' | int
void | int
true | int
'1e3' | int
blank | int
'4.5' | float
'x' | float
'x' | float(1.5)
'1e3' | float
'inf' | float
n | float
true | float
none | float
half | round
2.567 | round(2)
3.5 | round
2.5 | round
-1.5 | round
2.1 | round(0, 'ceil')
2.19 | round(1, 'floor')
7 | round
1234 | round(-2)
minus | abs
-2.5 | abs
n | string
1.0 | string
list | string
name | title
"it's a (big) x-y" | title
name | capitalize
name | upper
name | lower
padded | trim
'xxaxx' | trim('x')
'a b  c' | wordcount
'it is, so!' | wordcount
path | replace('a', 'x')
path | replace('a', 'x', 1)
n | replace('7', 'x')
'a\nb' | indent
'a\nb\n\nc' | indent(2)
'a\nb\n\nc' | indent(2, true)
'a\nb\n\nc' | indent(2, true, true)
'a\nb' | indent(width=3, first=true)
'a\nb' | indent('>>')
'a\n' | indent(2) ~ '|'
'hello world again' | truncate(11)
'hello world again' | truncate(11, true)
'hello world again' | truncate(11, true, '..')
'hello world again' | truncate(14, false, '…', 0)
'hello' | center(11) ~ '|'
'one two three four' | wordwrap(9)
'<a href="x">' | escape
'<b>' | e
'<b>' | safe
'<b>a</b>' | striptags
'a b&c' | urlencode
{'a': 1, 'b': 'x y'} | urlencode
'%s-%s' | format(1, 'x')
'%(a)s' | format(a=1)
1000000 | filesizeformat
1000 | filesizeformat(true)
name | pprint
table | xmlattr
undefined_name | default
undefined_name | default('x')
undefined_name | d('x')
blank | default('x')
blank | default('x', true)
blank | default('x', boolean=true)
no | default('x', true)
table.b | default('x')
table | attr('b')
'a,b' | first
table | first
list | random is number
list | tojson
table | tojson
mixed | tojson
tool | tojson
tool | tojson(indent=4)
tool | tojson(indent=none)
tool | tojson(ensure_ascii=true)
tool | tojson(sort_keys=true)
tool | tojson(separators=(',', ':'))
tool | tojson(separators=[',', ': '], indent=2)
tool | tojson(false, 2)
tool | tojson(indent='--')
void | tojson(indent=2)
none_of | tojson(indent=2)
'<a>&\'é"\n\x7f\x01/' | tojson
'日本😀' | tojson(ensure_ascii=True)
1.0 | tojson
big | tojson
small | tojson
1e22 | tojson
[1.5, -0.0, 100.0] | tojson
true | tojson
(1, 2) | tojson
{1: 'a'} | tojson
{true: 1, none: 2} | tojson
range(3) | tojson
undefined_name | tojson
table.items() | list | tojson
'x' | tojson | length
('x' | tojson) ~ '<'
name is string
n is string
n is number
yes is number
yes is boolean
n is boolean
n is integer
yes is integer
1.0 is integer
half is float
n is float
list is sequence
name is sequence
table is sequence
range(2) is sequence
(1, 2) is sequence
n is sequence
list is mapping
table is mapping
list is iterable
name is iterable
table is iterable
n is iterable
undefined_name is sequence
undefined_name is string
undefined_name is mapping
undefined_name is undefined
range is callable
name is callable
name.upper is callable
n is odd
n is even
n is divisibleby(7)
n is divisibleby 2
n is eq(7)
n is equalto 7
n is ne 8
n is gt 3
n is ge(7)
n is lt 3
n is le 7
n is greaterthan 3
n is lessthan 3
n is in [7]
n is not in [7]
'a' is in 'abc'
n is sameas 7
yes is sameas true
1 is sameas true
yes is true
n is true
no is false
0 is false
'abc' is lower
'ABC' is upper
'aBc' is lower
'upper' is filter
'nope' is filter
'odd' is test
name is not string
n is not none and n > 3
n is defined and not no
name is escaped
not n is string
n is string or n is number
table is mapping and table.b is defined
namespace(a=1).a
namespace({'a': 2}).a
namespace(_a=1)
dict2 is defined
{'a': 1}.a
{'a': 1, 'b': 2}.items() | list
{'a': 1, **{'b': 2}}
joiner(',') is callable
cycler('a', 'b').next()
lipsum is callable
raise_exception('no')
raise_exception(1)
'a' 'b'
'a\\b'
'tab\there'
'\u00e9\x41'
"double \"inner\""
'single \'inner\''
words | map('upper') | map('lower') | list
1, 2
[1, 2,]
(n)
((n))
n | string | length
-n | abs
2 * n | string
n + 1 | float
'a' ~ n | string
not yes | string
(n > 3) | string
(n, half) | join(' ')
name.upper().lower().title()
name | upper | replace('L', '1')
name.split(' ')[0]
name.split(' ') | last
name.split()[1][0]
lines.strip().split('\n') | length
''.__class__.__mro__
table.__len__
table.__class__
words|map('upper')|join(',')~'!'
words[0] ~ words[-1]
rows[0].role == 'user' and rows[-1]['n'] == 3
rows[0]['role'] ~ '/' ~ rows[1].text
(rows | last).n
rows | map(attribute='n') | max
list | map('string') | join
list | map('float') | list
list | map('int', default=1) | sum
list | list | sort | first
rows | length > 2 and rows[2].text is not defined
path.split('/')[-1].strip()
'a' in path.split('/')
n is odd and 'odd' or 'even'
'%02d:%02d' % (n, 5)
'{:>3}'.format(n)
"%s" | format(name)
list is not mapping
'a' < 'B'
'Z' < 'a'
[3, 'a'] | sort
true + true
true and 'x' or 'y'
5 // 2 * 2 + 5 % 2
10 - 2 - 3
2 * 3 + 4
(1 + 2) * 3
1 - -1
1.5 * 2
3 * 0.1
1e308 * 10
7 // 0.0
""".strip("\n")

STATEMENTS = r"""
{% for x in nothing %}{{ x }}{% endfor %}
{% for x in undefined_name %}{{ x }}{% else %}none{% endfor %}
{% for x in table.missing %}{{ x }}{% endfor %}.
{% for x in n %}{{ x }}{% endfor %}
{% for x in nothing or [] %}{{ x }}{% else %}e{% endfor %}
{% for x in 'abc' %}{{ x }},{% endfor %}
{% for k in table %}{{ k }},{% endfor %}
{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %}
{% for k, v in table | items %}{{ k }}={{ v }};{% endfor %}
{% for k, v in table | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for k, v in undefined_name.items() %}{{ k }}{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }};{% endfor %}
{% for a, b in [1] %}{{ a }}{% endfor %}
{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}{{ a }}{{ loop.last }};{% endfor %}
{% for a in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}
{% for a in list %}{{ loop.previtem }}<{{ a }}>{{ loop.nextitem }};{% endfor %}
{% for a in list %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}
{% for a in list %}{{ loop.cycle('x', 'y') }}{{ loop.changed(a > 1) }}{{ loop.depth }};{% endfor %}
{% for a in list %}{% if loop.index == 2 %}{% break %}{% endif %}{{ a }}{% endfor %}
{% for a in list %}{% if a == 1 %}{% continue %}{% endif %}{{ a }}{% endfor %}
{% for a in list recursive %}{{ a }}{% endfor %}
{% for a in [[1, [2]], [3]] recursive %}{% if a is number %}{{ a }}{% else %}({{ loop(a) }}){% endif %}{% endfor %}
{% for a in list %}{% for b in words %}{{ loop.index }}{% if loop.last %}|{% endif %}{% endfor %}{% endfor %}
{% for a in list | sort %}{{ a }}{% endfor %}
{% for a in rows | selectattr('role', 'equalto', 'user') %}{{ a.n }}{{ loop.last }}{% endfor %}
{% for a in range(3) %}{{ a }}{% endfor %}
{% for a in list[::-1] %}{{ a }}{% endfor %}
{% for a in list | reverse %}{{ a }}{{ loop.last }}{% endfor %}
{% for x in list if x in [1, 2] %}{{ x }}{% endfor %}
{% for x in (nothing if yes else list) %}{{ x }}{% endfor %}
{% for x in list if x > 1 else %}{% endfor %}
{% for x in nothing | default([], true) %}{{ x }}{% else %}e{% endfor %}
{% for x in [] %}{% else %}{{ x is defined }}{% endfor %}
{% set x = 1 %}{% for a in list %}{% set x = a %}{% endfor %}{{ x }}
{% set ns = namespace(x=0, seen=false) %}{% for a in list %}{% set ns.x = ns.x + a %}{% endfor %}{{ ns.x }}{{ ns.seen }}
{% set ns = namespace() %}{% set ns.a = [] %}{% for a in list %}{% set ns.a = ns.a + [a] %}{% endfor %}{{ ns.a }}
{% set table.x = 1 %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}
{% set a, b = [1, 2] %}{{ a }}{{ b }}
{% set x %}body {{ n }}{% endset %}[{{ x }}]
{% set x | upper %}body{% endset %}[{{ x }}]
{% set x = none %}{{ x }}{% if x %}a{% else %}b{% endif %}
{% set x = nothing if nothing else 'd' %}{{ x }}
{% if nothing %}a{% elif void %}b{% elif 0 %}c{% elif '' %}d{% elif 0.0 %}e{% else %}f{% endif %}
{% if 'a' in table and table.a %}x{% endif %}
{% if undefined_name %}x{% else %}y{% endif %}
{% if table.missing is defined and table.missing is not none %}x{% else %}y{% endif %}
{% if nothing is iterable and nothing | length > 0 %}x{% else %}y{% endif %}
{% if undefined_name is iterable and undefined_name | length > 0 %}x{% else %}y{% endif %}
{% if list is iterable and list is not string and list | length > 0 %}x{% endif %}
{% if not nothing is defined %}x{% else %}y{% endif %}
{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }};{{ m(1, 3) }};{{ m(b=4, a=5) }}
{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m() }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{{ kwargs }}{% endmacro %}{{ m(1, z=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}
{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}
{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in{% endcall %}
{% macro m() %}[{{ caller(1, 2) }}]{% endmacro %}{% call(a, b) m() %}{{ a + b }}{% endcall %}
{% macro m() %}  x  {% endmacro %}{{ m() | trim }}{{ m() | length }}{{ m.name }}
{% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(3) }}
{% macro m(x) %}{{ n }}{{ x }}{% endmacro %}{% set n = 1 %}{{ m(2) }}
{% macro m(x) %}{% set y = x %}{{ y }}{% endmacro %}{{ m(2) }}{{ y is defined }}
{% macro m(x) %}{{ x is defined }}{{ x }}{% endmacro %}{{ m() }}{{ m(none) }}
{% macro m(x, n=none) %}{{ x }}{{ n }}{% endmacro %}{{ m('a') }}
{% with x = 1, y = 2 %}{{ x + y }}{% endwith %}{{ x is defined }}
{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}
{% filter upper %}a{{ n }}b{% endfilter %}
{% filter replace('a', 'x') | upper %}abc{% endfilter %}
{% raw %}{{ x }}{% endraw %}
{%- raw -%} {{ x }} {%- endraw -%} y
{# comment #}a{#- c -#} b
a {{- n -}} b
a {%- if yes -%} b {%- endif -%} c
a¶  {% if yes %}¶  b¶  {% endif %}¶c¶
a¶  {%+ if yes %}¶  b¶  {%- endif %}¶c¶
a¶  {% if yes +%}¶  b¶  {% endif %}¶c¶
¶{{ n }}¶¶
a¶  {# x #}¶b¶
a¶  {{ n }}  ¶b
{% generation %}x{{ n }}{% endgeneration %}¶y
a {%- generation -%} x {%- endgeneration -%} y
{% do list.append(1) %}
{% autoescape true %}{{ '<' }}{% endautoescape %}
{% include 'x' %}
{% import 'x' as y %}
{% extends 'x' %}
{% block b %}x{{ n }}{% endblock %}
{% if %}{% endif %}
{{ n
{% for %}
{% unknown %}
{{ n | unknown }}
{{ n is unknown }}
{{ unknown() }}
{{ unknown.x() }}
{{ name.unknown() }}
{% if no %}{{ n | unknown }}{% endif %}ok
{% if no %}{{ n is unknown }}{% endif %}ok
{{ 'a' if no }}{{ n }}
{%- for m in rows %}¶<{{ m.role }}>{{ m.text }}¶{%- endfor %}
{%- for m in rows -%}¶  {{- '<' + m['role'] + '>' + (m['text'] or '') -}}¶{%- endfor -%}
{{- '' }}{% set x = [] %}{% for m in rows %}{% set x = x + [m.n] %}{% endfor %}{{ x }}
{% set loop_messages = rows[1:] %}{{ loop_messages | length }}{{ loop_messages[0].role }}
{% set last = rows | last %}{{ last.n }}{% set last = rows[-1] %}{{ last['n'] }}
{% for m in rows[::-1] %}{% set i = rows | length - 1 - loop.index0 %}{{ i }}{{ m.n }};{% endfor %}
{% for m in rows %}{% if loop.previtem and loop.previtem.role != m.role %}|{% endif %}{{ m.n }}{% endfor %}
{% for m in rows %}{% if loop.last or (not loop.last and loop.nextitem.role != 'tool') %}{{ m.n }}{% endif %}{% endfor %}
{% for m in rows %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}
{{ "%s" % "{{ x }}" }}{{ '{% if %}' }}
{{ '#}' }}{{ '}}' }}
{%- set d = {'a': 1} -%}{{ d.a }}{%- set d = dict(d, b=2) -%}{{ d.b }}
{% set x = dict(a=1) %}{{ x.a }}{{ x }}
{% for key, value in tool.parameters.properties.items() %}{{ key }}:{{ value.type | upper }}{{ value | tojson }}{% endfor %}
{% for k in tool.keys() | sort %}{{ k }}{% endfor %}
{% for k in ['b', 'a'] | sort(reverse=true) %}{{ k }}{% endfor %}
{% set v = tool['parameters'] %}{% if v is mapping %}{{ v | tojson }}{% elif v is string %}{{ v }}{% endif %}
{% if '</think>' in path %}{{ path.split('</think>')[-1].lstrip('\n') }}{% else %}{{ path }}{% endif %}
{% set c = 'a<think>b</think>c' %}{{ c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}|{{ (c.split('</think>') | last).lstrip('\n') }}
{% set c = '<think>\nb\n</think>\n\nc' %}{{ c.partition('</think>')[2].lstrip() }}
{% set ns = namespace(i=-1) %}{% for m in rows %}{% if m.role == 'user' %}{% set ns.i = loop.index0 %}{% endif %}{% endfor %}{{ ns.i }}
{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a ~ ns.b }}
{% set ns = namespace(l=rows) %}{{ ns.l[0].n }}{{ ns.missing is defined }}
{% if rows[0].role == 'system' %}s{% else %}{% set system = 'd' %}{% endif %}{{ system }}
{% if yes %}{% set inner = 1 %}{% endif %}{{ inner }}
{{ rows | map(attribute='role') | unique | join(',') }}
{%- for x in list %}{{ x }}{{ ', ' if not loop.last }}{% endfor %}
{%- for x in list %}{{ x }}{{ ', ' if not loop.last else '' }}{% endfor %}
{%- for x in list %}{{- x -}}{%- if not loop.last %},{% endif -%}{%- endfor %}
{{ rows[0].text | default(rows[0].n) }}{{ rows[2].text | default('none') }}
{{ rows[2].text is string }}{{ rows[2]['text'] is none }}{{ rows[2].get('text') is none }}{{ rows[2].get('text', '') == '' }}
{{ strftime_now('%Y') | length }}
{{ strftime_now is defined }}{{ date_string is not defined }}
{% set x = strftime_now is defined and 'a' or 'b' %}{{ x }}
{{ 'line one' }}¶¶¶{{ 'line two' }}¶
{% set text = 'x' %}{% set text = text + 'y' %}{% set text = text ~ 1 %}{{ text }}
{% set args = tool.parameters %}{% for k, v in args | items %}{{ k }}={{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }};{% endfor %}
{% for x in [true, 1, 1.0, 'a', none, [1], {'k': 'v'}] %}{{ x | string }}|{{ x is string }}|{{ x is boolean }}|{{ x is number }};{% endfor %}
{% macro render(v, depth=0) %}{% if v is mapping %}{ {%- for k, x in v | dictsort %}{{ k }}: {{ render(x, depth + 1) }}{% if not loop.last %}, {% endif %}{% endfor %}}{% elif v is string %}"{{ v }}"{% elif v is sequence %}[{% for x in v %}{{ render(x) }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}{{ render(tool) }}
{% macro kind(p) %}{% if p.type is string %}{{ p.type }}{% elif p.type is iterable %}{{ p.type | join(' | ') }}{% else %}any{% endif %}{% endmacro %}{{ kind({'type': 'a'}) }};{{ kind({'type': ['a', 'b']}) }};{{ kind({}) }};{{ kind({'type': none}) }}
{% set x = {'a': [1, {'b': none}]} %}{{ x }}{{ x | string | length }}
{{ {'a': 1} == {'a': 1.0} }}{{ [1] == [true] }}
{{ n }}{% set n = 8 %}{{ n }}
{% for n in [1] %}{{ n }}{% endfor %}{{ n }}
{% for i in range(2) %}{% set outer = loop %}{% for j in range(2) %}{{ outer.index }}{{ loop.index }};{% endfor %}{% endfor %}
{% for c in [{'type': 'text', 'text': 'a'}, {'type': 'image'}] %}{% if c['type'] == 'text' %}{{ c['text'] | trim }}{% elif c.type in ('image', 'image_url') or 'image' in c %}<image>{% endif %}{% endfor %}
{% set content = [{'type': 'text', 'text': 'a'}] %}{% if content is string %}s{% elif content is sequence %}{{ content | map(attribute='text') | join }}{% endif %}
{% set tools = [tool] if tool else none %}{% if tools is not none and tools %}{{ tools[0].name }}{% endif %}
{% if tools %}a{% else %}b{% endif %}{% if tools is defined and tools is not none %}c{% endif %}{% if not tools is none %}d{% endif %}
{% if tools is iterable and tools | length > 0 %}a{% else %}b{% endif %}
{% for t in tools %}{{ t }}{% endfor %}
{% for t in tools or [] %}{{ t }}{% endfor %}.
{% for d in documents %}{{ d }}{% endfor %}
{{ tools }}{{ documents }}{{ add_generation_prompt }}
{{ messages }}{{ messages | length }}
{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}
{{ bos_token + 'x' }}{{ pad_token + 'x' }}
{% if (tools is defined) and (tools is not none) and (tools | length) %}a{% endif %}.
""".strip("\n")

# Two tokens of the tokenizer; the other special tokens are undefined.
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = {"messages": [], "tools": None, "documents": None, "add_generation_prompt": False}


def rendered(template):
    try:
        return _compile_jinja_template(template).render(**PLAIN, **TOKENS, **VARIABLES)
    except Exception:  # whatever the template raises
        return None


def main():
    expressions = ["{{ " + line + " }}" for line in EXPRESSIONS.split("\n")]
    statements = [line.replace("¶", "\n") for line in STATEMENTS.split("\n")]
    crlf = [text.replace("\n", "\r\n") for text in statements if "\n" in text]
    cases = [[template, rendered(template)] for template in expressions + statements + crlf]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{{"variables":{json.dumps(VARIABLES, ensure_ascii=False)},\n"cases":[\n{lines}\n]}}\n', newline="\n")
    print(f"{OUT}: {len(cases)} templates, {sum(text is None for _, text in cases)} rejected")


if __name__ == "__main__":
    main()
