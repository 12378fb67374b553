use super::*;

/// The lines of the symbols, with the number of symbols around each.
fn outline(path: &str, text: &str) -> Vec<(usize, String)> {
    let found = FileSymbols::of(path, text).unwrap();
    let level = |symbol: &Symbol| {
        let above = |parent: &u32| found.symbols[*parent as usize].parent;
        std::iter::successors(symbol.parent, above).count()
    };
    found.symbols.iter().map(|symbol| (level(symbol), format!("{}: {}", symbol.line, symbol.text))).collect()
}

fn lines(expected: &[(usize, &str)]) -> Vec<(usize, String)> {
    expected.iter().map(|(level, line)| (*level, (*line).to_owned())).collect()
}

#[test]
fn definitions_of_python() {
    let text = "import os\nLIMIT = 3\n\n@decorated\nclass Queue(Base):\n    size = 1\n    def put(self, item):\n        local = 1\n\nasync def main(\n    a,\n):\n    pass\n";
    let expected = [
        (0, "2: LIMIT = 3"),
        (0, "5: class Queue(Base):"),
        (1, "7: def put(self, item):"),
        (0, "10: async def main(a,):"),
    ];
    assert_eq!(outline("a.py", text), lines(&expected));
}

#[test]
fn definitions_of_javascript_and_typescript() {
    let text = "export const LIMIT = 3;\nexport function first(a) { const inner = 1; }\nclass Queue {\n  put(item) {}\n}\nconst later = async () => {\n};\n";
    let expected = [
        (0, "1: export const LIMIT = 3;"),
        (0, "2: export function first(a) { const inner = 1; }"),
        (0, "3: class Queue"),
        (1, "4: put(item) {}"),
        (0, "6: const later = async () =>"),
    ];
    assert_eq!(outline("a.js", text), lines(&expected));
    let text = "export interface Shape { area(): number }\ntype Id = string;\nenum Color { Red }\nabstract class Base {\n  abstract run(): void;\n}\n";
    let expected = [
        (0, "1: export interface Shape { area(): number }"),
        (1, "1: export interface Shape { area(): number }"),
        (0, "2: type Id = string;"),
        (0, "3: enum Color { Red }"),
        (0, "4: abstract class Base"),
        (1, "5: abstract run(): void;"),
    ];
    assert_eq!(outline("a.ts", text), lines(&expected));
    assert_eq!(outline("a.tsx", "const a = () => <b/>;\n"), lines(&[(0, "1: const a = () => <b/>;")]));
}

#[test]
fn definitions_of_rust() {
    let text = "mod other;\npub struct Queue<T> {\n    items: Vec<T>,\n}\nimpl<T> Queue<T> {\n    pub fn put(&mut self, item: T) {\n    }\n}\nimpl Marker for Queue<u8> {}\ntrait Run { fn run(&self); }\nmacro_rules! try_it { () => {} }\nconst MAX: u8 = 1;\nmod inner {\n    enum State { On }\n}\n";
    let expected = [
        (0, "2: pub struct Queue<T>"),
        (0, "5: impl<T> Queue<T>"),
        (1, "6: pub fn put(&mut self, item: T)"),
        (0, "10: trait Run { fn run(&self); }"),
        (1, "10: trait Run { fn run(&self); }"),
        (0, "11: macro_rules! try_it { () => {} }"),
        (0, "12: const MAX: u8 = 1;"),
        (0, "13: mod inner"),
        (1, "14: enum State { On }"),
    ];
    assert_eq!(outline("a.rs", text), lines(&expected));
}

#[test]
fn definitions_of_go() {
    let text = "package a\n\nconst Max = 1\n\nvar (\n\tFirst = 1\n\tSecond = 2\n)\n\ntype Queue struct {\n\titems []int\n}\n\nfunc (q *Queue) Put(item int) {\n\tvar local = 1\n}\n\nfunc main() {}\n";
    let expected = [
        (0, "3: const Max = 1"),
        (0, "6: First = 1"),
        (0, "7: Second = 2"),
        (0, "10: type Queue struct"),
        (0, "14: func (q *Queue) Put(item int)"),
        (0, "18: func main() {}"),
    ];
    assert_eq!(outline("a.go", text), lines(&expected));
}

#[test]
fn definitions_of_c_cpp_and_java() {
    let text = "#define LIMIT 3\n#define TWICE(x) ((x) * 2)\nstruct queue { int size; };\ntypedef unsigned long id_t;\nstatic int *find(struct queue *q, int item);\nint main(void) {\n    int local = 1;\n    return 0;\n}\n";
    let expected = [
        (0, "1: #define LIMIT 3"),
        (0, "2: #define TWICE(x) ((x) * 2)"),
        (0, "3: struct queue { int size; };"),
        (0, "4: typedef unsigned long id_t;"),
        (0, "5: static int *find(struct queue *q, int item);"),
        (0, "6: int main(void)"),
    ];
    assert_eq!(outline("a.c", text), lines(&expected));
    let text = "#ifndef A_H\n#define A_H\nnamespace box {\nclass Queue {\n public:\n  void put(int item);\n  int size = 0;\n};\n}\nvoid box::Queue::put(int item) {}\ntemplate <typename T> T &pick(T &a) { return a; }\n#endif\n";
    let expected = [
        (0, "3: namespace box"),
        (1, "4: class Queue"),
        (2, "6: void put(int item);"),
        (0, "10: void box::Queue::put(int item) {}"),
        (0, "11: template <typename T> T &pick(T &a) { return a; }"),
    ];
    assert_eq!(outline("a.h", text), lines(&expected));
    let text = "package a;\npublic class Queue {\n  private int size;\n  @Override\n  public void put(int item) {\n  }\n}\ninterface Run { void run(); }\n";
    let expected = [
        (0, "2: public class Queue"),
        (1, "5: public void put(int item)"),
        (0, "8: interface Run { void run(); }"),
        (1, "8: interface Run { void run(); }"),
    ];
    assert_eq!(outline("A.java", text), lines(&expected));
}

#[test]
fn definitions_that_libraries_are_made_of() {
    let text = "exports.start = function (a) {};\nclass A {\n  onClick = () => {};\n  size = 1;\n}\n";
    let expected = [(0, "1: exports.start = function (a) {};"), (0, "2: class A"), (1, "3: onClick = () => {};")];
    assert_eq!(outline("a.js", text), lines(&expected));
    assert_eq!(outline("a.ts", "class A {\n  onClick = () => {};\n}\n")[1].1, "2: onClick = () => {};");
    let text = "class A {\n  static final int MAX = 1;\n  final int size = 1;\n  A(int size) {}\n}\n";
    let expected = [(0, "1: class A"), (1, "2: static final int MAX = 1;"), (1, "4: A(int size) {}")];
    assert_eq!(outline("A.java", text), lines(&expected));
    let text = "typedef struct git_oid {\n  int id;\n} git_oid;\ntypedef int (*callback_t)(int);\n";
    let expected = [(0, "1: typedef struct git_oid ... git_oid"), (0, "4: typedef int (*callback_t)(int);")];
    assert_eq!(outline("a.c", text), lines(&expected));
    let text = "void run() {\n  std::lock_guard<std::mutex> lock(mutex_);\n}\n";
    assert_eq!(outline("a.cpp", text), lines(&[(0, "1: void run()")]));
}

#[test]
fn reach_tells_who_can_use_a_definition() {
    let reach = |path: &str, text: &str| -> Vec<(String, Reach)> {
        let found = FileSymbols::of(path, text).unwrap();
        found.symbols.iter().filter_map(|symbol| Some((symbol.name.as_deref()?.to_owned(), symbol.reach))).collect()
    };
    let text = "pub fn shared() {}\nfn private() {}\ntrait Run { fn run(&self); }\nimpl Run for A { fn run(&self) {} }\n\
                impl A { pub(crate) fn new() {} }\n";
    let expected = [
        ("shared", Reach::Repository),
        ("private", Reach::File),
        ("Run", Reach::File),
        ("run", Reach::Member),
        ("run", Reach::File),
        ("new", Reach::Member),
    ];
    assert_eq!(reach("a.rs", text), expected.map(|(name, reach)| (name.to_owned(), reach)));
    let expected = [("_helper", Reach::File), ("Queue", Reach::Repository), ("put", Reach::Member)];
    let found = reach("a.py", "def _helper(): pass\nclass Queue:\n    def put(self): pass\n");
    assert_eq!(found, expected.map(|(name, reach)| (name.to_owned(), reach)));
    assert_eq!(reach("a.cpp", "namespace a {\nvoid run() {}\n}\n")[1].1, Reach::Repository);
}

/// Texts with which a parser or a walk of quadratic time would need minutes.
#[test]
fn hostile_texts_take_limited_work() {
    let raw_strings = "r#\"".repeat(100_000);
    let nested = "x=>{var[a]=".repeat(20_000);
    let one_line = format!("{}\u{202e}", "function f(){}".repeat(20_000));
    // The budget of the parser ends in the middle of a character.
    let cut: Vec<String> =
        (0..4).map(|pad| format!("{}{}", " ".repeat(pad), format!("r#\"{}", "€".repeat(20)).repeat(2000))).collect();
    let mut texts = vec![("a.rs", &raw_strings), ("a.js", &nested), ("b.js", &one_line)];
    texts.extend(cut.iter().map(|text| ("b.rs", text)));
    for (path, text) in texts {
        let found = FileSymbols::of(path, text).unwrap();
        assert!(found.symbols.iter().all(|symbol| symbol.text.len() < 1000), "{path}");
    }
}

#[test]
fn name_is_shown_in_a_long_line_and_brackets_in_texts_join_nothing() {
    let text = format!("class A {{}} {} class Last {{}}\n", "class B { put() { return 1 } } ".repeat(10));
    assert!(outline("a.js", &text).last().unwrap().1.contains("class Last"));
    let text = "OPEN = '('\ndef first(a=':('):\n    pass\n";
    assert_eq!(outline("a.py", text), lines(&[(0, "1: OPEN = '('"), (0, "2: def first(a=':('):")]));
    let wide = format!("def {}(): pass\n", "漢".repeat(30));
    assert!(outline("a.py", &wide)[0].1.len() < 200);
    assert_eq!(
        outline("a.c", "int (*callback)(int);\nint run(int a,\n        int b);\n"),
        lines(&[(0, "2: int run(int a, int b);")])
    );
    let found = FileSymbols::of("a.py", "def outer():\n    def inner_helper(): pass\n").unwrap();
    assert_eq!(found.symbols[1].reach, Reach::File);
}

#[test]
fn modules_of_tests_are_left_out() {
    let text = "fn code() {}\n#[cfg(test)]\nmod tests {\n    fn helper() {}\n}\nfn more() {}\n";
    let found = FileSymbols::of("a.rs", text).unwrap();
    let without = found.without_tests();
    let names: Vec<&str> = without.symbols.iter().filter_map(|symbol| symbol.name.as_deref()).collect();
    assert_eq!(names, ["code", "more"]);
    assert_eq!(without.references, found.references);
}

#[test]
fn uses_are_counted_without_definitions_and_short_names() {
    let found =
        FileSymbols::of("a.py", "def first(second):\n    x = first(second)\n    return third.fourth\n").unwrap();
    let uses: Vec<(&str, u32)> = found.references.iter().map(|(name, uses)| (&**name, *uses)).collect();
    assert_eq!(uses, [("first", 1), ("fourth", 1), ("second", 2), ("third", 1)]);
}

#[test]
fn broken_deep_and_long_texts_are_read_as_far_as_possible() {
    assert_eq!(
        outline("a.py", "def good():\n    pass\n\ndef bad(:\n"),
        lines(&[(0, "1: def good():"), (0, "4: def bad(:")])
    );
    let deep = format!("def good(): pass\n{}{}\n", "[".repeat(30_000), "]".repeat(30_000));
    assert!(FileSymbols::of("a.py", &deep).is_some());
    let long = "x".repeat(MAX_SOURCE_BYTES + 1);
    assert_eq!(FileSymbols::of("a.py", &long), Some(FileSymbols::NONE));
    assert_eq!(FileSymbols::of("a.md", "# Title\n"), None);
    let wide = format!("def good({}): pass\n", "argument, ".repeat(100));
    assert!(outline("a.py", &wide)[0].1.ends_with(" ..."));
    let hidden = outline("a.py", "def good(a='\u{202e}'): pass\n");
    assert_eq!(hidden, lines(&[(0, "1: def good(a='<U+202E>'): pass")]));
}
