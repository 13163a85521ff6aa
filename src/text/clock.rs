//! `strftime` for chat templates that print today's date, in UTC.

use std::fmt::Write;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats `seconds` since 1970-01-01T00:00Z as C's `strftime` does in the C locale; an unknown directive is kept.
pub(super) fn strftime(format: &str, seconds: i64) -> String {
    let days = seconds.div_euclid(86_400);
    let second = seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, sec) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = (days + 4).rem_euclid(7) as usize;
    let year_day = days - days_before(year, 1, 1) + 1;
    let (day_name, month_name) = (DAYS[weekday], MONTHS[month as usize - 1]);
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        // glibc's `-` asks for no padding.
        let bare = directive == Some('-');
        if bare {
            directive = rest.next();
        }
        let mut number = |value: i64, width: usize| {
            let _ = if bare { write!(out, "{value}") } else { write!(out, "{value:0width$}") };
        };
        match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year.rem_euclid(100), 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('j') => number(year_day, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(sec, 2),
            Some('w') => number(weekday as i64, 1),
            Some('u') => number((weekday as i64 + 6) % 7 + 1, 1),
            Some('e') => {
                let _ = write!(out, "{day:2}");
            }
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => {
                let _ = write!(out, "{year:04}-{month:02}-{day:02}");
            }
            Some('T') => {
                let _ = write!(out, "{hour:02}:{minute:02}:{sec:02}");
            }
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some(other) if other != '%' => {
                out.push('%');
                out.push(other);
            }
            _ => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day number, day 0 being 1970-01-01 (proleptic Gregorian).
fn civil(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days.div_euclid(366);
    while days_before(year + 1, 1, 1) <= days {
        year += 1;
    }
    let month = (1..=12).rev().find(|m| days_before(year, *m, 1) <= days).unwrap_or(1);
    (year, month, days - days_before(year, month, 1) + 1)
}

/// Day number of a date.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let before = year - 1;
    let leaps = |y: i64| y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400);
    let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
    let lengths = [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let in_year: i64 = lengths[..month as usize - 1].iter().sum();
    (year - 1970) * 365 + leaps(before) - leaps(1969) + in_year + day - 1
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime("%d %b %Y %H:%M:%S %A %j", 0), "01 Jan 1970 00:00:00 Thursday 001");
        assert_eq!(strftime("%-d %B %y %a %I %p", 951_782_400), "29 February 00 Tue 12 AM");
        assert_eq!(strftime("%F %T %%", 1_735_689_599), "2024-12-31 23:59:59 %");
        assert_eq!(strftime("%F", -1), "1969-12-31");
    }
}
