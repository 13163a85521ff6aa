//! Text from runs on a page. Markup in it is escaped.

/// `text` for HTML, in an element or a quoted attribute. Control characters except line breaks and tabs become visible
/// symbols. The UTF-16 length does not change, because it locates the ends of tokens.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            '\0'..='\u{1f}' => out.push(char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}')),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// `writeln!` to a `String`, which does not fail.
macro_rules! put {
    ($out:expr, $($args:tt)*) => {{
        use std::fmt::Write as _;
        let _ = writeln!($out, $($args)*);
    }};
}
pub(super) use put;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_stays_text_and_keeps_its_length() {
        let hostile = "</script><img src=x onerror='a'>&\"\u{1b}[31m\0\r\n\u{9b}𝄞";
        let safe = escape(hostile);
        assert!(!safe.contains(['<', '>', '"', '\'', '\0', '\u{1b}', '\r']), "{safe}");
        let back = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")];
        let shown = back.iter().fold(safe, |text, (entity, c)| text.replace(entity, c));
        assert_eq!(shown.encode_utf16().count(), hostile.encode_utf16().count());
    }
}
