//! As much of HTTP/1.1 as a server in a test needs.

use std::io::{self, BufRead, Write};

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Path and query, as they were sent.
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    pub(crate) fn path(&self) -> &str {
        self.target.split('?').next().unwrap()
    }

    /// A parameter of the query, decoded; empty where it has no value.
    pub(crate) fn query(&self, name: &str) -> Option<String> {
        let (_, query) = self.target.split_once('?')?;
        query.split('&').find_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key == name).then(|| decode(value))
        })
    }

    /// None at the connection's end.
    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Option<Self>> {
        let Some(line) = read_line(from)? else {
            return Ok(None);
        };
        let mut words = line.split(' ').map(str::to_owned);
        let (method, target) = (words.next().unwrap(), words.next().unwrap());
        let headers = read_headers(from)?;
        let length = header(&headers, "content-length").map_or(0, |l| l.parse().unwrap());
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        Ok(Some(Self {
            method,
            target,
            headers,
            body,
        }))
    }

    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        for (name, value) in &self.headers {
            if name != "connection" {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
        }
        head.push_str("connection: close\r\n\r\n");
        to.write_all(head.as_bytes())?;
        to.write_all(&self.body)
    }
}

impl Response {
    pub(crate) fn new(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: Vec::new(),
        }
    }

    pub(crate) fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    pub(crate) fn body(self, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        Self { body, ..self }
    }

    /// Reads a server's answer on a connection that it then closes.
    pub(crate) fn read(from: &mut impl BufRead, head_only: bool) -> io::Result<Self> {
        let line = read_line(from)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let headers = read_headers(from)?;
        let mut body = Vec::new();
        let chunked = header(&headers, "transfer-encoding") == Some("chunked");
        if head_only || status == 204 || status == 304 {
        } else if chunked {
            loop {
                let line = read_line(from)?.ok_or(io::ErrorKind::UnexpectedEof)?;
                let length = usize::from_str_radix(line.trim(), 16).unwrap();
                let mut chunk = vec![0; length + 2];
                from.read_exact(&mut chunk)?;
                if length == 0 {
                    break;
                }
                body.extend_from_slice(&chunk[..length]);
            }
        } else if let Some(length) = header(&headers, "content-length") {
            body.resize(length.parse().unwrap(), 0);
            from.read_exact(&mut body)?;
        } else {
            from.read_to_end(&mut body)?;
        }
        Ok(Self {
            status,
            headers,
            body,
        })
    }

    /// The head, with the body's length unless the headers have one (as an answer to HEAD has).
    pub(crate) fn head(&self) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} X\r\n", self.status);
        for (name, value) in &self.headers {
            if name != "transfer-encoding" && name != "connection" {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
        }
        if header(&self.headers, "content-length").is_none() && self.status != 204 {
            head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        }
        head.push_str("\r\n");
        head.into_bytes()
    }
}

fn header<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    let found = headers.iter().find(|(key, _)| key == name);
    found.map(|(_, value)| value.as_str())
}

fn read_line(from: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    let count = from.read_line(&mut line)?;
    Ok((count > 0).then(|| line.trim_end().to_owned()))
}

fn read_headers(from: &mut impl BufRead) -> io::Result<Vec<(String, String)>> {
    let mut headers = Vec::new();
    loop {
        let line = read_line(from)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let Some((name, value)) = line.split_once(':') else {
            return Ok(headers);
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
}

fn decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.bytes());
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                let digits = std::str::from_utf8(&digits).unwrap();
                bytes.push(u8::from_str_radix(digits, 16).unwrap());
            }
            b'+' => bytes.push(b' '),
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).unwrap()
}
