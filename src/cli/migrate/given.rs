//! What a launch gives: options with their values, and numbers of processes.

/// An option that is given. A switch has no values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    pub name: String,
    pub values: Vec<String>,
}

impl Given {
    pub fn text(&self) -> String {
        self.values.join(" ")
    }
}

/// The processes that a launcher starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Processes {
    pub nodes: Option<usize>,
    pub per_node: Option<usize>,
    pub total: Option<usize>,
}

impl Processes {
    /// These numbers, and those of `other` for the missing ones.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            nodes: self.nodes.or(other.nodes),
            per_node: self.per_node.or(other.per_node),
            total: self.total.or(other.total),
        }
    }
}
