

# Environments: the part of this program that answers turns.

import base64
import io

EPISODES = {}
ENVIRONMENTS = ("a class with step(self, text), which may also have reset(self, prompt, label, **columns), "
                "or step(observation, action, label, **kwargs)")


def parameters_of(function):
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


def environment_style(value):
    """'class', 'states' (a class whose methods take one dict) or 'function', else None."""
    if inspect.isclass(value):
        step = getattr(value, "step", None)
        if not callable(step):
            return None
        names = [p.name for p in parameters_of(step)]
        return "states" if names and names[0] in ("states", "state_dict") else "class"
    if inspect.isfunction(value) and value.__name__ == "step":
        names = [p.name for p in parameters_of(value)]
        return "function" if names[:2] == ["observation", "action"] else None
    return None


def find_environment(module, settings):
    wanted = settings["function"]
    if wanted:
        value = getattr(module, wanted, None)
        if value is None:
            raise Unusable(f"the file has no class or function '{wanted}'")
        style = environment_style(value)
        if style is None:
            raise Unusable(f"'{wanted}' must be {ENVIRONMENTS}")
        return wanted, value, style, awaits(value)
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"}
    found = {n: environment_style(v) for n, v in own.items()}
    found = {n: style for n, style in found.items() if style is not None}
    if len(found) == 1:
        (name, style), = found.items()
        return name, own[name], style, awaits(own[name])
    if found:
        raise Unusable(f"the file has several environments ({', '.join(found)}); "
                       "set reward.environment = { python = { file, function } }")
    raise Unusable(f"the file has no environment, which is {ENVIRONMENTS}")


def awaits(value):
    """Whether its answers are awaited together."""
    return is_async(getattr(value, "step", value))


async def called(function, positional, columns):
    """Calls `function` with the named arguments that it has."""
    parameters = parameters_of(function)
    rest = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][len(positional):]
    named = {p.name: columns[p.name] for p in rest if p.name in columns}
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        filled = [p.name for p in parameters][:len(positional)]
        named = {name: value for name, value in columns.items() if name not in filled}
    return await waited(function(*positional, **named))


class Episode:
    """One response: the object that answers it, and the number of turns it has seen."""

    def __init__(self, value, style, request):
        self.value, self.style, self.seen = value, style, 0
        self.columns = {"prompt": request["prompt"], "label": request["label"], "source": request["source"],
                        "prompt_id": request["prompt_id"], "sample": request["sample"]}
        self.columns.update(request["row"]["columns"])

    async def begin(self, request):
        if self.style == "function":
            return
        self.value = self.value()
        if not hasattr(self.value, "reset"):
            return
        states = {"observation": request["prompt"], "label": request["label"], **self.columns}
        if self.style == "states":
            first = await waited(self.value.reset(states))
        else:
            first = await called(self.value.reset, [], self.columns)
        first = first.get("observation") if isinstance(first, dict) else first
        if first is not None and first != request["prompt"]:
            raise ValueError("reset must return None or the prompt: prompts come from the data only")

    async def step(self, request):
        before, turn = request["turns"][:self.seen], request["turns"][self.seen]
        observation = request["prompt"] + "".join(old["text"] + (old["feedback"] or "") for old in before)
        text = turn["text"]
        columns = {**self.columns, "text": text, "tokens": turn["tokens"], "turn": self.seen, "finish": turn["finish"],
                   "turns_max": request["turns_max"]}
        self.seen += 1
        if self.style == "function":
            result = await called(self.value, [observation, text, request["label"]], columns)
        elif self.style == "states":
            states = {**columns, "observation_text": observation, "action_text": text, "observation": observation, "action": text,
                      "label": request["label"], "sampling_params": None}
            result = await waited(self.value.step(states))
        else:
            first = parameters_of(self.value.step)[:1]
            by_name = bool(first) and first[0].name in ("tokens", "turn", "finish")
            result = await called(self.value.step, [] if by_name else [text], columns)
        try:
            return answered(result, observation + text)
        except Exception as error:
            # An environment may answer otherwise the next time.
            error.lasts = False
            raise


def first_of(result, names, default=None):
    return next((result[name] for name in names if result.get(name) is not None), default)


def with_encoded_images(value):
    """`value` with the bytes of image files in base64, and with images of Pillow as data URLs of PNG files."""
    if isinstance(value, dict):
        encoded = {key: base64.b64encode(value[key]).decode() for key in ("bytes", "base64") if isinstance(value.get(key), bytes)}
        return {**{key: with_encoded_images(x) for key, x in value.items()}, **encoded}
    if isinstance(value, (list, tuple)):
        return [with_encoded_images(x) for x in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if hasattr(value, "save") and hasattr(value, "getbands"):
        file = io.BytesIO()
        value.save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return value


def answered(result, so_far):
    """The result of a step in one form: feedback, reward, done, and values for the logs."""
    if isinstance(result, tuple) and len(result) == 3:
        result = dict(zip(("feedback", "reward", "done"), result))
    if not isinstance(result, dict):
        raise TypeError(f"step must return (feedback, reward, done) or a dict (got {type(result).__name__})")
    unknown = not any(name in result for name in ("reward", "rewards", "done"))
    if unknown:
        raise TypeError(f"step must return a dict with reward or done (got {sorted(map(str, result))[:8]})")
    feedback = first_of(result, ("feedback", "environment_feedback"))
    whole = result.get("next_observation")
    if feedback is None and whole is not None:
        if not isinstance(whole, str) or not whole.startswith(so_far):
            raise ValueError("next_observation must begin with observation and action: sampled text cannot change")
        feedback = whole[len(so_far):]
    if feedback is None:
        feedback = ""
    if hasattr(feedback, "tolist"):
        feedback = feedback.tolist()
    if isinstance(feedback, dict):
        feedback = [feedback]
    kinds = {type(x) for x in feedback} if isinstance(feedback, (list, tuple)) else None
    if not (isinstance(feedback, str) or kinds is not None and kinds <= {int} or kinds == {dict}):
        raise TypeError(f"feedback must be a string, or a list of token ids or messages (got {feedback!r:.80})")
    logs = result.get("extra_logs") or result.get("extra") or {}
    extra = {str(name): logged(value, 1, str(name))[0] for name, value in logs.items()}
    reward = number(first_of(result, ("reward", "rewards"), 0.0), "the reward")
    images = with_encoded_images(first_of(result, ("images", "image")))
    return {"feedback": with_encoded_images(feedback), "images": images, "reward": reward,
            "done": bool(first_of(result, ("done",), False)), "extra": extra}


async def answer_turn(value, style, request, _settings):
    """The answer to the last turn. Another process may have answered the earlier ones, so they are replayed."""
    for old in [key for key in EPISODES if key[0] != request["round"]]:
        del EPISODES[old]
    turns, key = request["turns"], (request["round"], request["episode"])
    episode = EPISODES.get(key)
    if episode is None or episode.seen != len(turns) - 1:
        episode = Episode(value, style, request)
        await episode.begin(request)
        for _ in turns[:-1]:
            await episode.step(request)
    # If this step fails, half of it may be done, so the next attempt starts again.
    EPISODES.pop(key, None)
    answer = await episode.step(request)
    if not (answer["done"] or len(turns) >= request["turns_max"] or turns[-1]["finish"] == "length"):
        EPISODES[key] = episode
    return answer
