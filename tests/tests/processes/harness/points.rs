//! Points of `muster-fault`, armed in the processes of one node.

use super::Bed;

impl Bed {
    /// Arms a point: the first process of the node that passes it does as ordered.
    pub(crate) fn arm(&self, node: usize, point: &str, order: &str) {
        let points = self.home(node).join("points");
        let aside = points.join(".new");
        let _older = std::fs::remove_file(points.join(format!("{point}.taken")));
        std::fs::write(&aside, order).unwrap();
        std::fs::rename(aside, points.join(point)).unwrap();
    }

    /// Whether a process of the node has passed the point since it was armed.
    pub(crate) fn taken(&self, node: usize, point: &str) -> bool {
        let name = format!("n{node}/points/{point}.taken");
        self.path(&name).exists()
    }
}
