//! Filters whose results are generators in Python. A generator is true even if it is empty. It has neither a length nor
//! items by index, and `tojson` rejects it.

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Kwargs, Object, ObjectRepr, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters};

#[derive(Debug)]
struct Generator(Vec<Value>);

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let this = Arc::clone(self);
        Enumerator::Iter(Box::new((0..self.0.len()).map(move |at| this.0[at].clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

type Test<'a> = Option<Cow<'a, str>>;
type More = Rest<ValueOrKwargs>;

pub fn add_to(environment: &mut Environment) {
    environment.add_filter("map", |state: &mut State, all: Value, more: More| filters::map(state, all, more).map(list));
    environment.add_filter("select", |state: &mut State, all: Value, test: Test<'_>, more: More| {
        filters::select(state, all, test, more).map(list)
    });
    environment.add_filter("reject", |state: &mut State, all: Value, test: Test<'_>, more: More| {
        filters::reject(state, all, test, more).map(list)
    });
    environment.add_filter(
        "selectattr",
        |state: &mut State, all: Value, key: Cow<'_, str>, test: Test<'_>, more: More| {
            filters::selectattr(state, all, key, test, more).map(list)
        },
    );
    environment.add_filter(
        "rejectattr",
        |state: &mut State, all: Value, key: Cow<'_, str>, test: Test<'_>, more: More| {
            filters::rejectattr(state, all, key, test, more).map(list)
        },
    );
    environment.add_filter("unique", |state: &State, all: Value, options: Kwargs| {
        generator(&filters::unique(state, all, options)?)
    });
    environment.add_filter("batch", |state: &State, all: Value, count: usize, fill: Option<Value>| {
        generator(&filters::batch(state, all, count, fill)?)
    });
    environment.add_filter("slice", |state: &State, all: Value, count: usize, fill: Option<Value>| {
        generator(&filters::slice(state, all, count, fill)?)
    });
    environment.add_filter("items", |dict: &Value| generator(&filters::items(dict)?));
    environment.add_filter("reverse", |all: &Value| {
        let reversed = filters::reverse(all)?;
        if reversed.kind() == ValueKind::String { Ok(reversed) } else { generator(&reversed) }
    });
}

fn list(items: Vec<Value>) -> Value {
    Value::from_object(Generator(items))
}

fn generator(items: &Value) -> Result<Value, Error> {
    Ok(list(items.try_iter()?.collect()))
}

/// Whether a value is the result of one of these filters.
pub fn is_generator(value: &Value) -> bool {
    value.as_object().is_some_and(DynObject::is::<Generator>)
}
