"""Runs a user's reward function or environment for rlhf-hpc: JSON lines in on standard input, JSON lines out on standard output.

Started as `python3 -X utf8 -c THIS SETTINGS`. SETTINGS is JSON: file, function, environment (whether it is one),
label_argument, columns (of the rows), memory_bytes, timeout_s, steps.
The first output line names the function that was found, and whether it takes log-probabilities, or gives the error. After that, each input line is a list of
requests, and each request gets one output line, in any order. A list has several requests only if the function is
asynchronous: they are then awaited together.

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
import types

ERROR_CHARS_MAX = 6000
# Exceptions of code that would raise them again.
LASTING = (ImportError, NameError, NotImplementedError, SyntaxError, TypeError)


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


def style_of(function, by_name=True):
    """'trl', 'openrlhf', 'verl' or None, from the parameters. TRL passes everything by name, so a function with no other
    sign of it but `**kwargs` may be one: `by_name` accepts it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters]
    if "solution_str" in names:
        return "verl"
    if "completions" in names or "completion_ids" in names:
        return "trl"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    own_name = getattr(function, "__name__", "")
    if "queries" in names or (own_name == "reward_func" and len(positional) >= 3):
        return "openrlhf"
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    return "trl" if takes_any and (by_name or own_name == "reward_func") else None


SIGNATURES = ("reward_func(queries, prompts, labels, **kwargs), f(prompts, completions, **columns) or "
              "compute_score(data_source, solution_str, ground_truth, extra_info)")


def find(module, wanted):
    if wanted:
        function = getattr(module, wanted, None)
        if not callable(function):
            raise Unusable(f"the file has no function '{wanted}'")
        style = style_of(function)
        if style is None:
            raise Unusable(f"'{wanted}' must have the signature {SIGNATURES}")
        return wanted, function, style
    own = {name: value for name, value in vars(module).items()
           if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")}
    found = {}
    for by_name in (False, True):
        if not found:
            styles = {name: style_of(value, by_name) for name, value in own.items()}
            found = {name: (own[name], style) for name, style in styles.items() if style is not None}
    for usual in ("reward_func", "compute_score"):
        if usual in found:
            found = {usual: found[usual]}
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
    if "logprobs" in request:
        columns.setdefault("logprobs", request["logprobs"])
    if label_argument:
        columns[label_argument] = request["labels"]
    return columns


def as_trl(request, settings, extra):
    """TRL's arguments. For a row of messages, prompts and completions are lists of messages. What `log_extra` and
    `log_metric` record is added to `extra`."""
    prompts, completions = [], []
    for row, text, response in zip(request["rows"], request["prompts"], request["responses"]):
        prompt = row["prompt"]
        is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
        prompts.append(prompt if is_chat or isinstance(prompt, str) else text)
        completions.append([{"role": "assistant", "content": response}] if is_chat else response)

    def log_extra(column, values):
        extra[str(column)] = logged(values, len(prompts), str(column))

    def log_metric(name, value):
        extra[str(name)] = logged(value, len(prompts), str(name))

    state = types.SimpleNamespace(global_step=request["step"], max_steps=settings["steps"])
    return {"prompts": prompts, "completions": completions, "trainer_state": state, "log_extra": log_extra,
            "log_metric": log_metric}


def as_verl(request):
    """verl's arguments for each response."""
    for i, row in enumerate(request["rows"]):
        columns = row["columns"]
        if "logprobs" in request:
            columns = {"logprobs": request["logprobs"][i], **columns}
        nested = columns.get("reward_model")
        truth = request["labels"][i] or (nested.get("ground_truth") if isinstance(nested, dict) else "")
        yield {"data_source": columns.get("data_source", request["sources"][i]), "ground_truth": truth, "extra_info": {},
               **columns, "solution_str": request["responses"][i]}


EMPTY = {key: [] for key in
         ("rows", "prompts", "responses", "labels", "sources", "prompt_ids", "prompt_tokens", "tokens", "finish",
          "logprobs")}
EMPTY["step"] = 0


def arguments(function, style, request, settings, extra):
    """Positional and named arguments. Raises Unusable if the function requires an unknown argument."""
    columns = columns_of(request, settings["label_argument"], settings["columns"])
    parameters = list(inspect.signature(function).parameters.values())
    positional = []
    if style == "trl":
        columns.update(as_trl(request, settings, extra))
    known = ", ".join(columns)
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
    return positional, named_of(parameters, columns, known)


def named_of(parameters, columns, known):
    """The `columns` that `parameters` take by name."""
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
    return named


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


NOTED = set()
NOTES = []


def logged(value, count, name):
    """Values for the logs. Values that are not numbers are left out, and noted once per name."""
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
                NOTES.append(f"values of '{name}' that are not finite numbers are not kept: {error}")
    return entries


LOOP = []


def event_loop():
    """The only loop, because some objects are bound to their loop."""
    if not LOOP:
        import asyncio  # Slow to load, and seldom needed.
        LOOP.append(asyncio.new_event_loop())
    return LOOP[0]


async def waited(result):
    """Awaits a coroutine's result."""
    if not inspect.isawaitable(result):
        return result

    async def wait():
        return await result
    loop = event_loop()
    return await result if loop.is_running() else loop.run_until_complete(wait())


def begun(result):
    """Starts an awaitable if the loop runs, so that several are awaited together."""
    if inspect.isawaitable(result) and event_loop().is_running():
        return event_loop().create_task(result)
    return result


def is_async(function):
    return inspect.iscoroutinefunction(inspect.unwrap(function)) \
        or inspect.iscoroutinefunction(getattr(function, "__call__", None))


def one_by_one(answering):
    """The result of a coroutine that never suspends: without a running loop, user code may start its own."""
    try:
        answering.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a synchronous function must not suspend")


async def answer(function, style, request, settings):
    count, extra = len(request["prompts"]), {}
    if style == "verl":
        parameters = list(inspect.signature(function).parameters.values())
        calls = [begun(function(**named_of(parameters, columns, ", ".join(columns)))) for columns in as_verl(request)]
        result = [await waited(call) for call in calls]
    else:
        positional, named = arguments(function, style, request, settings, extra)
        result = await waited(function(*positional, **named))
    try:
        if style == "verl":
            result = verl_result(result, extra)
        return {"rewards": checked(result, count, style, extra), "extra": extra}
    except Exception as error:
        error.lasts = True
        raise


def verl_result(results, extra):
    """Scores, from one number or dict with `score` for each response. Other values of the dicts are logged."""
    dicts = [result if isinstance(result, dict) else {"score": result} for result in results]
    for one in dicts:
        if one.get("score") is None:
            raise TypeError(f"compute_score must return a number or a dict with 'score' (got {one!r:.80})")
    for name in dict.fromkeys(name for one in dicts for name in one if name != "score"):
        extra[str(name)] = logged([one.get(name) for one in dicts], len(dicts), str(name))
    return [one.get("score") for one in dicts]


def checked(result, count, style, extra):
    """The rewards in a result, after all its checks. Its values for the logs are added to `extra`."""
    if isinstance(result, dict):
        if "rewards" not in result:
            raise TypeError(f"the result must be a dict with 'rewards' (got {sorted(map(str, result))[:8]})")
        for name, value in (result.get("extra_logs") or {}).items():
            extra[str(name)] = logged(value, count, str(name))
        if result.get("scores") is not None:
            extra["scores"] = logged(result["scores"], count, "scores")
        result = result["rewards"]
    rewards = [number(x, f"reward {i}") for i, x in enumerate(listed(result, count, "the result"))]
    if style != "trl" and None in rewards:
        raise TypeError(f"reward {rewards.index(None)} is None, but only a function with TRL's signature may abstain")
    return rewards


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
        if style == "verl":
            known = ["data_source", "solution_str", "ground_truth", "extra_info", "logprobs", *settings["columns"]]
            named_of(list(inspect.signature(function).parameters.values()), dict.fromkeys(known), ", ".join(known))
        else:
            arguments(function, style, EMPTY, settings, {})
    except Unusable as error:
        raise Unusable(f"'{found}': {error}") from None
    return found, function, style, is_async(function)


def why(error):
    """The traceback of the user's own code, without the frames of this driver and of the import system."""
    if isinstance(error, Unusable):
        return str(error)
    shown = traceback.TracebackException.from_exception(error)
    own = [f for f in shown.stack if f.filename != "<string>" and not f.filename.startswith("<frozen importlib")]
    shown.stack = traceback.StackSummary.from_list(own)
    return "".join(shown.format())[-ERROR_CHARS_MAX:]


def failure(error):
    """An error for the trainer, and whether it would occur again."""
    return {"error": why(error), "lasts": getattr(error, "lasts", isinstance(error, (Unusable, *LASTING)))}


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
        name, function, style, is_together = find_it(load(settings["file"]), settings)
    except BaseException as error:
        reply(failure(error))
        return
    # They are long, so they are sent only to a function that names them.
    named = not settings["environment"] and "logprobs" in inspect.signature(function).parameters
    reply({"function": name, "together": is_together, "logprobs": named})

    async def answered(request):
        try:
            return await answer_it(function, style, request, settings)
        except BaseException as error:
            return failure(error)

    async def in_time(request):
        answering = asyncio.ensure_future(answered(request))
        finished, _ = await asyncio.wait([answering], timeout=settings["timeout_s"])
        answering.cancel()
        late = {"error": f"no answer within {settings['timeout_s']:g} s", "late": True}
        reply_to(request, answering.result() if finished else late)

    def reply_to(request, message):
        notes, NOTES[:] = NOTES[:], []
        reply({"id": request["id"], "notes": notes, **message})

    async def together(requests):
        await asyncio.gather(*map(in_time, requests))

    if is_together:
        import asyncio
    for line in requests:
        if is_together:
            event_loop().run_until_complete(together(json.loads(line)))
        else:
            for request in json.loads(line):
                reply_to(request, one_by_one(answered(request)))
