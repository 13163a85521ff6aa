//! GPUs of other systems as ranks: the number of ranks, their placement, and the commands that start them.

use super::draft::Draft;
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

/// The ranks of groups, which the options `names` give. Several groups are the placement of the job.
pub fn set_groups(draft: &mut Draft, groups: &[Group], names: &[&str]) {
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
    if groups.len() > 1 {
        draft.set("mesh.placement", entries, names);
        draft.head.push("without mesh.placement every rank has all roles, and none waits for another".to_owned());
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
