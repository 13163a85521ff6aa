"""Runs a user's reward function or environment for rlhf-hpc: JSON lines in on standard input, JSON lines out on standard output.

Started as `python3 -X utf8 -c THIS SETTINGS`. SETTINGS is JSON: file, function, environment (whether it is one),
label_argument, columns (of the rows), memory_bytes.
The first output line names the function that was found, or gives the error. After that, each input line gets one
output line.

The protocol's streams are moved away from descriptors 0 and 1 before any user code runs. So everything that the user's
code prints, from C too, goes to standard error. The user's code runs in a child, and this process only waits for it.
"""

import importlib.util
import inspect
import json
import math
import numbers
import os
import resource
import signal
import sys
import traceback

ERROR_CHARS_MAX = 6000


def take_streams():
    os.closerange(3, 1024)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    return requests, replies


def limit(memory_bytes):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes > 0:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or memory_bytes < hard:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def adopt_descendants():
    """Makes orphaned descendants of this process (a daemon, a double fork) its children instead of init's."""
    try:
        import ctypes
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError) as error:
        print(f"processes that the reward started may outlive it: {error}", file=sys.stderr)


def children():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            found.append(int(pid))
    return found


def end_descendants():
    """Kills children until there are none. The children of a dead child become children of this process."""
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def ended(child):
    """The status of `child` if it has ended. Also reaps all other children that have ended."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None


def run_user_code_in_a_child(streams):
    """Forks, and returns in the child, which runs the user's code. This process waits until the child or the trainer ends,
    or for SIGTERM. Then it kills all descendants, and ends with the status of the child."""
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    trainer = os.getppid()
    adopt_descendants()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    for stream in streams:
        stream.close()
    status = None
    while status is None and os.getppid() == trainer:
        arrived = signal.sigtimedwait(watched, 1.0)
        if arrived is not None and arrived.si_signo == signal.SIGTERM:
            break
        status = ended(child)
    end_descendants()
    if status is None or os.WIFSIGNALED(status):
        number = signal.SIGKILL if status is None else os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class Unusable(Exception):
    """The file or the function cannot be used. Reported without a traceback."""


def style_of(function):
    """'trl', 'openrlhf' or None, from the parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters]
    if "completions" in names:
        return "trl"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if "queries" in names or (getattr(function, "__name__", "") == "reward_func" and len(positional) >= 3):
        return "openrlhf"
    return None


SIGNATURES = "reward_func(queries, prompts, labels, **kwargs) or f(prompts, completions, **columns)"


def find(module, wanted):
    if wanted:
        function = getattr(module, wanted, None)
        if not callable(function):
            raise Unusable(f"the file has no function '{wanted}'")
        style = style_of(function)
        if style is None:
            raise Unusable(f"'{wanted}' must have the signature {SIGNATURES}")
        return wanted, function, style
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            style = style_of(value)
            if style is not None:
                found[name] = (value, style)
    if "reward_func" in found:
        found = {"reward_func": found["reward_func"]}
    if len(found) == 1:
        (name, (function, style)), = found.items()
        return name, function, style
    if found:
        raise Unusable(f"several functions have a known signature ({', '.join(found)}); set reward.python.function")
    raise Unusable(f"no function has the signature {SIGNATURES}")


def columns_of(request, label_argument, known=()):
    """The arguments available by name: built-in columns, and the fields of the rows. If names collide, fields win."""
    columns = {
        "responses": request["responses"],
        "label": request["labels"],
        "labels": request["labels"],
        "source": request["sources"],
        "prompt_id": request["prompt_ids"],
        "prompt_tokens": request["prompt_tokens"],
        "finish": request["finish"],
    }
    rows = [row["columns"] for row in request["rows"]]
    names = dict.fromkeys([*known, *(name for row in rows for name in row)])
    columns.update((name, [row.get(name) for row in rows]) for name in names)
    columns.update(prompts=request["prompts"], completions=request["responses"], completion_ids=request["tokens"])
    if label_argument:
        columns[label_argument] = request["labels"]
    return columns


def as_trl(request):
    """Prompts and completions in TRL's form. For a row of messages, both are lists of messages."""
    prompts, completions = [], []
    for row, text, response in zip(request["rows"], request["prompts"], request["responses"]):
        prompt = row["prompt"]
        is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
        prompts.append(prompt if is_chat or isinstance(prompt, str) else text)
        completions.append([{"role": "assistant", "content": response}] if is_chat else response)
    return {"prompts": prompts, "completions": completions}


EMPTY = {key: [] for key in
         ("rows", "prompts", "responses", "labels", "sources", "prompt_ids", "prompt_tokens", "tokens", "finish")}


def arguments(function, style, request, settings):
    """Positional and named arguments. Raises Unusable if the function requires an unknown argument."""
    columns = columns_of(request, settings["label_argument"], settings["columns"])
    known = ", ".join(columns)
    if style == "trl":
        columns.update(as_trl(request))
    parameters = list(inspect.signature(function).parameters.values())
    positional = []
    if style == "openrlhf":
        queries = [p + r for p, r in zip(request["prompts"], request["responses"])]
        positional = [queries, request["prompts"], request["labels"]]
        filled = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
        if len(filled) < 3 and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            raise Unusable(f"it must take (queries, prompts, labels), but its argument count is {len(filled)}")
        parameters = [p for p in parameters if p.name not in filled]
        # These three were passed by position, under any names.
        for name in (*filled, "prompts", "labels"):
            columns.pop(name, None)
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        named = columns
    else:
        named = {p.name: columns[p.name] for p in parameters if p.name in columns}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in columns
               and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing:
        raise Unusable(f"there is no value for its argument '{missing[0]}'; available are {known}; "
                       f"set reward.python.label_argument = \"{missing[0]}\" if it is the labels, "
                       f"or keep the field in the shard with --keep-field {missing[0]}")
    return positional, named


def listed(value, count, what):
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, numbers.Real) and count == 1:
        value = [value]
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{what} must be a list of {count} numbers (got {type(value).__name__})")
    value = list(value)
    if len(value) != count:
        raise ValueError(f"{what} has {len(value)} entries for {count} responses")
    return value


def number(value, what):
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number (got {value!r:.80} of type {type(value).__name__})")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number (got {value})")
    return value


def rewards_of(value, count, style):
    rewards = [number(x, f"reward {i}") for i, x in enumerate(listed(value, count, "the result"))]
    if style != "trl" and None in rewards:
        raise TypeError(f"reward {rewards.index(None)} is None, but only a function with TRL's signature may abstain")
    return rewards


NOTED = set()


def logged(value, count, name):
    """Values for the logs. Values that are not numbers are left out, with one message per name on standard error."""
    if isinstance(value, numbers.Real) or (hasattr(value, "tolist") and getattr(value, "ndim", 1) == 0):
        value = [value] * count
    entries = []
    for x in listed(value, count, f"extra_logs['{name}']"):
        try:
            entries.append(number(x, name))
        except (TypeError, ValueError) as error:
            entries.append(None)
            if name not in NOTED:
                NOTED.add(name)
                print(f"values of extra_logs['{name}'] that are not finite numbers are left out: {error}", file=sys.stderr)
    return entries


LOOP = []


def waited(result):
    """Awaits a coroutine's result. All coroutines run on one loop, because some objects are bound to their loop."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # Slow to load, and seldom needed.
    if not LOOP:
        LOOP.append(asyncio.new_event_loop())

    async def wait():
        return await result
    return LOOP[0].run_until_complete(wait())


def answer(function, style, request, settings):
    count = len(request["prompts"])
    positional, named = arguments(function, style, request, settings)
    result = waited(function(*positional, **named))
    extra = {}
    if isinstance(result, dict):
        if "rewards" not in result:
            raise TypeError(f"the result must be a dict with 'rewards' (got {sorted(map(str, result))[:8]})")
        for name, value in (result.get("extra_logs") or {}).items():
            extra[str(name)] = logged(value, count, str(name))
        if result.get("scores") is not None:
            extra["scores"] = logged(result["scores"], count, "scores")
        result = result["rewards"]
    return {"id": request["id"], "rewards": rewards_of(result, count, style), "extra": extra}


def load(file):
    name = os.path.splitext(os.path.basename(file))[0]
    sys.path.insert(0, os.path.dirname(file))
    sys.argv = [file]
    # No bytecode is written into the job's directory.
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise Unusable("the name of a Python file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_function(module, settings):
    found, function, style = find(module, settings["function"])
    try:
        arguments(function, style, EMPTY, settings)
    except Unusable as error:
        raise Unusable(f"'{found}': {error}") from None
    return found, function, style


def why(error):
    """The traceback of the user's own code, without the frames of this driver and of the import system."""
    if isinstance(error, Unusable):
        return str(error)
    shown = traceback.TracebackException.from_exception(error)
    own = [f for f in shown.stack if f.filename != "<string>" and not f.filename.startswith("<frozen importlib")]
    shown.stack = traceback.StackSummary.from_list(own)
    return "".join(shown.format())[-ERROR_CHARS_MAX:]


def main():
    settings = json.loads(sys.argv[1])
    requests, replies = take_streams()
    limit(settings["memory_bytes"])
    run_user_code_in_a_child((requests, replies))

    def reply(message):
        replies.write(json.dumps(message, allow_nan=False).encode() + b"\n")
        replies.flush()

    # BaseException, so that a stray sys.exit() in the user's code is also reported.
    find_it, answer_it = (find_environment, answer_turn) if settings["environment"] else (find_function, answer)
    try:
        name, function, style = find_it(load(settings["file"]), settings)
    except BaseException as error:
        reply({"error": why(error)})
        return
    reply({"function": name, "style": style})
    for line in requests:
        request = json.loads(line)
        try:
            message = answer_it(function, style, request, settings)
        except BaseException as error:
            message = {"id": request["id"], "error": why(error)}
        reply(message)

