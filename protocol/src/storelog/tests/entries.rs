//! Entries as bytes, of this build and of older ones.

use super::*;

/// As builds wrote it that knew no checksums.
pub(super) fn of_version_1(entry: &Entry) -> String {
    let text = String::from_utf8(entry.encode().unwrap()).unwrap();
    let (begin, _) = text.rsplit_once(",\"sum\":").unwrap();
    begin.replacen("{\"v\":2", "{\"v\":1", 1) + "}\n"
}

fn entry(body: Body) -> Entry {
    Entry {
        seq: 7,
        prev: Digest([5; 32]),
        writer: NodeId([0xa7; 32]),
        nonce: 1234,
        body,
    }
}

/// The same entry under another version, with its checksum.
fn under(version: u32, bytes: &[u8]) -> Vec<u8> {
    let text = std::str::from_utf8(bytes).unwrap();
    let (begin, _) = text.rsplit_once(",\"sum\":").unwrap();
    let (_, rest) = begin.split_once(",\"seq\"").unwrap();
    let begin = format!("{{\"v\":{version},\"seq\"{rest}");
    let sum = blake3::hash(begin.as_bytes()).to_hex();
    format!("{begin},\"sum\":\"{}\"}}\n", &sum[..16]).into_bytes()
}

/// An older build on the same store goes on until it cannot, and says which version it would have to be.
#[test]
fn an_entry_has_the_version_since_which_it_can_be_read() {
    let good = Some([3, 5]);
    let rules = Rules {
        last: 3,
        best: 1,
        metric: "metric".to_owned(),
        highest: false,
    };
    let reason = "checksum".to_owned();
    for (body, version) in [
        (Body::Claim(Box::new(birth(&[1], 1))), 2),
        (Body::Commit(commit_ref(Digest([9; 32]), 3, 4)), 2),
        (Body::Reject { seq: 2, reason }, 2),
        (Body::Pin { seq: 2 }, 2),
        (Body::Retire { seq: 2, good: None }, 2),
        (Body::Retire { seq: 2, good }, 3),
        (Body::Unpin { seq: 2 }, 3),
        (Body::Rules(rules), 3),
    ] {
        let entry = entry(body);
        let bytes = entry.encode().unwrap();
        assert!(bytes.starts_with(format!("{{\"v\":{version},").as_bytes()));
        assert_eq!(under(version, &bytes), bytes);
        assert_eq!(Entry::decode(&bytes), Ok(entry.clone()));
        // As builds wrote it that had no version 3, and as later ones may.
        assert_eq!(Entry::decode(&under(2, &bytes)), Ok(entry));
        for other in [0, 5] {
            let refused = Entry::decode(&under(other, &bytes)).unwrap_err();
            assert_eq!(refused, EntryError::Version(other));
            assert!(refused.to_string().contains("versions 1 to 4"));
        }
    }
}

/// A log of builds that had no version 3: this one goes on with it.
#[test]
fn an_older_log_is_read_to_its_end() {
    let mut store = BTreeMap::new();
    let mut a = with_commits(4);
    let good = Some([4, 5]);
    a.append(10, Body::Retire { seq: 2, good }, Time(1));
    settle(&mut a, &mut store, Time(1));
    assert_eq!(store.len(), 6);
    // Nothing follows the only one that differs, so the digests in between hold.
    let newest = store[&6].clone();
    store.insert(6, under(2, &newest));
    assert_ne!(store[&6], newest);

    let mut b = Log::new(key(), STORE, OPERATOR, 9);
    b.append(11, Body::Retire { seq: 3, good }, Time(2));
    let said = settle(&mut b, &mut store, Time(2));
    assert_eq!(outcome_of(&said, 11), Some(Outcome::Won { seq: 7 }));
    assert!(b.may_delete(2) && b.may_delete(3) && !b.may_delete(4));
}

#[test]
fn no_bit_of_the_newest_entry_flips_unseen() {
    let entry = entry(Body::Commit(commit_ref(Digest([9; 32]), 3, 4)));
    let bytes = entry.encode().unwrap();
    assert_eq!(Entry::decode(&bytes), Ok(entry));
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(Entry::decode(&flipped).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(Entry::decode(&bytes[..len]).is_err(), "cut to {len}");
    }
}

/// The text of each small entry, as files on a store hold it: later versions have to read it.
#[test]
fn entries_are_written_as_they_always_were() {
    let head = format!(
        r#"{{"v":1,"seq":7,"prev":"{}","writer":"{}","nonce":"00000000000004d2","body":"#,
        "05".repeat(32),
        "a7".repeat(32)
    );
    let commit = commit_ref(Digest([9; 32]), 3, 4);
    let reason = "checksum".to_owned();
    let cases = [
        (
            Body::Commit(commit),
            format!(
                r#"{{"commit":{{"generation":"{}","number":3,"step":30,"manifest":"0000000000000004{}01"}}}}"#,
                "09".repeat(32),
                "00".repeat(23)
            ),
        ),
        (retire(2), r#"{"retire":{"seq":2}}"#.to_owned()),
        (
            Body::Reject { seq: 2, reason },
            r#"{"reject":{"seq":2,"reason":"checksum"}}"#.to_owned(),
        ),
        (Body::Pin { seq: 2 }, r#"{"pin":{"seq":2}}"#.to_owned()),
    ];
    for (body, text) in cases {
        let entry = entry(body);
        let stored = format!("{head}{text}}}\n");
        assert_eq!(of_version_1(&entry), stored);
        assert_eq!(Entry::decode(stored.as_bytes()), Ok(entry));
    }
}
