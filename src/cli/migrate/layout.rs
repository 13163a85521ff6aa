//! GPUs of other systems as ranks: the number of ranks, their placement, and the commands that start them.

use super::draft::Draft;
use super::table::Kind;
use toml::{Table, Value};

/// The options for the nodes and the GPUs of a role.
pub const ROLE_NAMES: [(&str, [[&str; 2]; 2]); 4] = [
    ("actor", [["actor_num_nodes", "actor.num_nodes"], ["actor_num_gpus_per_node", "actor.num_gpus_per_node"]]),
    ("ref", [["ref_num_nodes", "ref.num_nodes"], ["ref_num_gpus_per_node", "ref.num_gpus_per_node"]]),
    ("critic", [["critic_num_nodes", "critic.num_nodes"], ["critic_num_gpus_per_node", "critic.num_gpus_per_node"]]),
    ("reward", [["reward_num_nodes", "reward.num_nodes"], ["reward_num_gpus_per_node", "reward.num_gpus_per_node"]]),
];

/// GPUs with the same roles.
#[derive(Clone, Debug)]
pub struct Group {
    pub roles: Vec<&'static str>,
    pub nodes: usize,
    pub per_node: usize,
}

impl Group {
    fn ranks(&self) -> usize {
        self.nodes * self.per_node
    }
}

/// The ranks of a launch that gives them to its launcher: torchrun, accelerate, deepspeed.
pub fn set_processes(draft: &mut Draft) {
    let of = draft.launch.processes;
    let nodes = of.nodes.unwrap_or(1).max(1);
    let total = of.total.or(of.per_node.map(|per_node| nodes * per_node)).unwrap_or(nodes).max(1);
    describe(draft, nodes, total.div_ceil(nodes), total);
}

/// The ranks of groups, whose placement becomes a comment. Asynchronous training needs it.
pub fn set_groups(draft: &mut Draft, groups: &[Group], is_async: bool) {
    let total: usize = groups.iter().map(Group::ranks).sum();
    let per_node = groups.iter().map(|group| group.per_node).max().unwrap_or(1).max(1);
    let nodes = total.div_ceil(per_node).max(1);
    let mut first = 0;
    let mut entries = Vec::new();
    for group in groups {
        let end = first + group.ranks();
        let roles: Vec<Value> = group.roles.iter().map(|role| (*role).into()).collect();
        let entry = [("roles".to_owned(), Value::Array(roles)), ("ranks".to_owned(), format!("{first}..{end}").into())];
        entries.push(Value::from(Table::from_iter(entry)));
        first = end;
    }
    let placement = Value::Array(entries);
    let names: Vec<&str> = ROLE_NAMES.iter().flat_map(|(_, pairs)| pairs.as_flattened()).copied().collect();
    if is_async {
        draft.set("mesh.placement", placement, &names);
        let is_partial = draft.is_true(&["train.partial_rollout_enable"]);
        let updates = if is_partial { 2 } else { 1 };
        draft.set("mesh.async_updates_max", updates, &["train.async_enable", "train.partial_rollout_enable"]);
    } else if groups.len() > 1 {
        draft.head.push(format!(
            "The placement there, if each role shall have ranks of its own: mesh.placement = {placement}"
        ));
    }
    if !is_async {
        for name in ["train.async_queue_size", "train.partial_rollout_enable"] {
            if draft.given(name).is_some() {
                draft.note(name, Kind::Needless, "no effect without async_enable");
            }
        }
    }
    describe(draft, nodes, per_node.min(total), total);
}

/// Adds the commands that start the ranks to the head of the job.
pub fn describe(draft: &mut Draft, nodes: usize, per_node: usize, total: usize) {
    let sequence = draft.value("mesh.sequence").and_then(Value::as_integer).unwrap_or(1).max(1) as usize;
    let total = total.max(sequence);
    draft.head.insert(0, format!("mpirun -n {total} --bind-to none rlhf-hpc JOB.toml"));
    draft.head.insert(
        1,
        format!(
            "sbatch --nodes={nodes} --ntasks-per-node={per_node} --gpus-per-node={per_node} --gpu-bind=none --exclusive \
             --wrap 'srun --mpi=pmix rlhf-hpc JOB.toml'"
        ),
    );
    draft.head.insert(
        2,
        format!("rlhf-hpc plan JOB.toml --ranks {total} --gpu h100   # the layout: mesh is left to the plan"),
    );
}
