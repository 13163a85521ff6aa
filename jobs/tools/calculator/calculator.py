"""A calculator as an environment. It answers a turn that ends with [a+b] with the sum. Any other turn is the final answer."""

import re


class Calculator:
    def reset(self, label):
        self.label = label

    def step(self, text):
        call = re.search(r"\[(\d{1,12})([+-])(\d{1,12})\]$", text)
        if call:
            a, sign, b = call.groups()
            return f"{int(a) + int(b) if sign == '+' else int(a) - int(b)};", 0.0, False
        return "", float(text.strip() == self.label), True
