use crate::record::Member;
pub fn order(previous: &[Member], joiners: &[Member]) -> Vec<Member> {
    let mut out = previous.to_vec();
    let mut j = joiners.to_vec();
    j.sort_by_key(|m| (m.place, m.node));
    out.extend(j);
    out
}
