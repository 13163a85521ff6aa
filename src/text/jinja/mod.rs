//! The template engine as Jinja 2 in Python: the same methods, operators, filters, numbers and line ends. The test
//! `templates_render_as_in_jinja_2` compares the two.

mod filters;
mod generators;
mod methods;
mod operators;
mod python;
mod source;
mod tojson;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Output, State, Value};

pub use source::translate;

/// An environment with the settings that `transformers` gives to Jinja.
pub fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(print);
    operators::add_to(&mut environment);
    filters::add_to(&mut environment);
    generators::add_to(&mut environment);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_function("cycler", minijinja_contrib::globals::cycler);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    Ok(environment)
}

fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if *state.auto_escape() != AutoEscape::None {
        return Ok(out.write_str(&python::str(&filters::escape(value)))?);
    }
    match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::str(value))?),
    }
}
