//! Trait objects of several types: boxed, shared, of types with and without drop glue, closures; prints each type's name and count.

use std::fmt::Debug;
use std::io::Write as _;
use std::sync::Arc;

trait Article {
    fn price(&self) -> u64;
}

mod shelf {
    #[derive(Debug)]
    pub struct Book {
        pub title: String,
        pub price: u64,
    }

    #[derive(Debug)]
    pub struct Stamp {
        pub price: u64,
        pub places: [u64; 5],
    }
}

impl Article for shelf::Book {
    fn price(&self) -> u64 {
        self.price + self.title.len() as u64
    }
}

impl Article for shelf::Stamp {
    fn price(&self) -> u64 {
        self.price + self.places[0]
    }
}

#[derive(Debug)]
struct Crate<T> {
    contents: Vec<T>,
}

impl<T: Debug> Article for Crate<T> {
    fn price(&self) -> u64 {
        self.contents.len() as u64
    }
}

fn main() {
    let mut articles: Vec<Box<dyn Article>> = Vec::new();
    let mut shared: Vec<Arc<dyn Debug + Send + Sync>> = Vec::new();
    let mut calls: Vec<Box<dyn Fn(u64) -> u64>> = Vec::new();
    for number in 0..700u64 {
        articles.push(Box::new(shelf::Book { title: format!("volume {number} of a long series"), price: number }));
        articles.push(Box::new(shelf::Stamp { price: number, places: [number; 5] }));
        if number % 7 == 0 {
            articles.push(Box::new(Crate { contents: vec![number; 20] }));
            shared.push(Arc::new(shelf::Book { title: format!("shared {number}"), price: number }));
            let text = format!("captured {number}");
            calls.push(Box::new(move |add| add + text.len() as u64));
        }
    }
    let sum: u64 = articles.iter().map(|article| article.price()).sum::<u64>() + calls.iter().map(|call| call(1)).sum::<u64>();
    let name = std::any::type_name::<shelf::Book>;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{} 800", name()).unwrap();
    writeln!(out, "{} 700", std::any::type_name::<shelf::Stamp>()).unwrap();
    writeln!(out, "{} 100", std::any::type_name::<Crate<u64>>()).unwrap();
    assert_eq!((sum, shared.len()), (756_023, 100));
    writeln!(out, "ready").unwrap();
    out.flush().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(600));
    // All are in use until here.
    drop((articles, shared, calls));
}
