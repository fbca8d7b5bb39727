// Runs kernels that package fuse has written: their text is all there is of them. It knows the
// instructions that appear there and in functions.ptx, and refuses a text with others.
#pragma once

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <memory>
#include <regex>
#include <sstream>
#include <stdexcept>

namespace ptx {

// What a thread has: registers of 64 bits, and the parameters.
struct State {
	std::vector<u64> r;
	const char *params;
};

// An instruction returns the number of the next one, or one of these.
enum { next = -1, finish = -2 };
typedef std::function<long(State &)> Step;

// The registers of an instruction. Most steps capture at most 16 bytes with them, which a
// std::function stores inline; it allocates memory for more.
struct Operands {
	u16 r, a, b, c;
};
template <class F> Step step(Operands o, F f) {
	return [o, f](State &s) { return s.r[o.r] = f(s.r[o.a], s.r[o.b], s.r[o.c]), next; };
}

// Constants are registers that nothing writes, and so is what a thread knows of itself.
enum { thread, block, blocks, unwritten };
struct Code {
	std::map<std::string, size_t> params;
	std::vector<u64> registers = std::vector<u64>(unwritten);
	std::vector<Step> steps;
	inline static std::atomic<u64> made;
	u64 number = ++made;

	// A thread that is no coroutine takes the registers of the last one of the same code: constants
	// are there, and the others are written before they are read.
	void run(const char *params) const {
		static thread_local State last;
		static thread_local u64 whose;
		if (!emulate::host.alone) {
			State s{registers, params};
			return run(s);
		}
		if (whose != number)
			last.r = registers, whose = number;
		last.params = params;
		run(last);
	}

	void run(State &s) const {
		s.r[thread] = thread_x(), s.r[block] = block_x(), s.r[blocks] = blocks_x();
		for (size_t at = 0;;) {
			long to = steps[at](s);
			if (to == finish)
				return;
			at = to == next ? at + 1 : size_t(to);
		}
	}
};

// ---- what instructions compute ----

inline f32 single(u64 x) { return bits_as<f32>((u32)x); }
inline u64 from(f32 x) { return bits_as<u32>(x); }
inline u64 from(f64 x) { return bits_as<u64>(x); }

template <class T> T ignore_nan(T a, T b, T result) { return a != a ? b : b != b ? a : result; }

// Each operation is compiled into the function that reads its operands and writes its result, here
// and for integers.
template <class T, class B> Step floating(const std::string &op, bool saturates, Operands o) {
	auto of = [=](auto f) -> Step {
		auto get = [f](u64 a, u64 b, u64 c) {
			return f(bits_as<T>((B)a), bits_as<T>((B)b), bits_as<T>((B)c));
		};
		if (saturates)
			return step(o, [get](u64 a, u64 b, u64 c) {
				return from(std::fmin(T(1), std::fmax(T(0), get(a, b, c))));
			});
		return step(o, [get](u64 a, u64 b, u64 c) { return from(get(a, b, c)); });
	};
	return op == "add" ? of([](T a, T b, T) { return a + b; })
		: op == "sub"  ? of([](T a, T b, T) { return a - b; })
		: op == "mul"  ? of([](T a, T b, T) { return a * b; })
		: op == "div"  ? of([](T a, T b, T) { return a / b; })
		: op == "fma"  ? of([](T a, T b, T c) { return std::fma(a, b, c); })
		: op == "rcp"  ? of([](T a, T, T) { return 1 / a; })
		: op == "sqrt" ? of([](T a, T, T) { return std::sqrt(a); })
		: op == "abs"  ? of([](T a, T, T) { return std::fabs(a); })
		: op == "neg"  ? of([](T a, T, T) { return -a; })
		: op == "ex2"  ? of([](T a, T, T) { return std::exp2(a); })
		: op == "min"  ? of([](T a, T b, T) { return ignore_nan(a, b, lesser(a, b)); })
		: op == "max"  ? of([](T a, T b, T) { return ignore_nan(a, b, greater(a, b)); })
		: op == "min.NaN"
		? of([](T a, T b, T) { return a != a ? a : b != b ? b : lesser(a, b); })
		: op == "max.NaN"
		? of([](T a, T b, T) { return a != a ? a : b != b ? b : greater(a, b); })
		: throw std::runtime_error("no operation " + op);
}

// An integer type, in registers of 64 bits. A text is parsed once, and runs for every thread: what
// an instruction computes compares no strings.
struct Integer {
	unsigned char unused; // bits of a register
	bool sign;

	explicit Integer(const std::string &t)
		: unused(t == "pred" ? 0 : 64 - std::stoi(t.substr(1))), sign(t[0] == 's') {}
	u64 extend(u64 x) const {
		return sign ? u64(i64(x << unused) >> unused) : x << unused >> unused;
	}
	u64 cut(u64 x) const { return unused == 32 ? u32(x) : x; }
	bool less(u64 a, u64 b) const { return sign ? i64(a) < i64(b) : a < b; }
};

inline Step integral(const std::vector<std::string> &parts, Operands o) {
	const std::string op = parts[0];
	const Integer t(parts.back());
	const bool wide = parts.size() > 2 && parts[1] == "wide", sign = t.sign;
	const u32 width = 64 - t.unused;
	auto of = [=](auto f) -> Step {
		if (wide)
			return step(o, [=](u64 a, u64 b, u64 c) { return f(t.extend(a), t.extend(b), c); });
		return step(o,
			[=](u64 a, u64 b, u64 c) { return t.cut(f(t.extend(a), t.extend(b), t.extend(c))); });
	};
	if (op == "mul" && parts[1] == "hi")
		return of([width](u64 a, u64 b, u64) { return u64((unsigned __int128)a * b >> width); });
	return op == "add" ? of([](u64 a, u64 b, u64) { return a + b; })
		: op == "sub"  ? of([](u64 a, u64 b, u64) { return a - b; })
		: op == "mul"  ? of([](u64 a, u64 b, u64) { return a * b; })
		: op == "mad"  ? of([](u64 a, u64 b, u64 c) { return a * b + c; })
		: op == "and"  ? of([](u64 a, u64 b, u64) { return a & b; })
		: op == "or"   ? of([](u64 a, u64 b, u64) { return a | b; })
		: op == "xor"  ? of([](u64 a, u64 b, u64) { return a ^ b; })
		: op == "neg"  ? of([](u64 a, u64, u64) { return 0 - a; })
		: op == "not"  ? of([](u64 a, u64, u64) { return ~a & 1; })
		: op == "shl"  ? of([](u64 a, u64 b, u64) { return a << b; })
		: op == "shr"  ? of([sign](u64 a, u64 b, u64) { return sign ? u64(i64(a) >> b) : a >> b; })
		: op == "div"
		? of([sign](u64 a, u64 b, u64) { return sign ? u64(i64(a) / i64(b)) : a / b; })
		: op == "min"  ? of([t](u64 a, u64 b, u64) { return t.less(a, b) ? a : b; })
		: op == "max"  ? of([t](u64 a, u64 b, u64) { return t.less(a, b) ? b : a; })
					   : throw std::runtime_error("no operation " + op);
}

// Which of less, equal and greater a comparison is true of.
struct Comparison {
	bool less, equal, greater;

	explicit Comparison(const std::string &op)
		: less(op == "lt" || op == "le" || op == "ne"),
		  equal(op == "eq" || op == "le" || op == "ge"),
		  greater(op == "gt" || op == "ge" || op == "ne") {}
	bool holds(bool is_less, bool is_equal) const {
		return is_less ? less : is_equal ? equal : greater;
	}
};

// 1 or 0. Comparisons of floats that end in u are also true of a NaN.
inline Step comparison(std::string op, const std::string &type, Operands o) {
	if (type[0] != 'f')
		return step(o, [c = Comparison(op), t = Integer(type)](u64 a, u64 b, u64) -> u64 {
			a = t.extend(a), b = t.extend(b);
			return c.holds(t.less(a, b), a == b);
		});
	bool unordered = op == "nan" || op.back() == 'u', ordered = op != "nan";
	if (op.size() > 2 && unordered)
		op.pop_back();
	auto compare = [c = Comparison(op), ordered, unordered](f64 x, f64 y) -> u64 {
		return x != x || y != y ? unordered : ordered && c.holds(x < y, x == y);
	};
	if (type == "f32")
		return step(o, [compare](u64 a, u64 b, u64) { return compare(single(a), single(b)); });
	return step(o,
		[compare](u64 a, u64 b, u64) { return compare(bits_as<f64>(a), bits_as<f64>(b)); });
}

// As a GPU does; the integer of a NaN is one that nobody should use.
template <class I> u64 saturate(f64 x) {
	if (!(x > (f64)std::numeric_limits<I>::min()))
		return (u64)std::numeric_limits<I>::min();
	return x >= (f64)std::numeric_limits<I>::max() ? (u64)std::numeric_limits<I>::max() : (u64)(I)x;
}

inline Step conversion(const std::string &rounding, const std::string &d, const std::string &s,
	Operands o) {
	auto brain = [](u64 a) -> u64 {
		return single(a) != single(a) ? 0x7fff : (a + 0x7fff + (a >> 16 & 1)) >> 16;
	};
	if (d == "bf16")
		return step(o, [=](u64 a, u64, u64) { return brain(a); });
	if (d == "bf16x2")
		return step(o, [=](u64 a, u64 b, u64) { return brain(a) << 16 | brain(b); });
	if (s[0] != 'f' && d[0] != 'f')
		return step(o, [from = Integer(s), to = Integer(d)](u64 a, u64, u64) {
			return to.cut(from.extend(a));
		});
	if (s[0] != 'f' && d == "f32") // rounded once
		return step(o, [t = Integer(s)](u64 a, u64, u64) {
			a = t.extend(a);
			return from(t.sign ? (f32)(i64)a : (f32)a);
		});
	if (s[0] != 'f')
		return step(o, [t = Integer(s)](u64 a, u64, u64) {
			a = t.extend(a);
			return from(t.sign ? (f64)(i64)a : (f64)a);
		});
	if (d == "f16")
		return step(o, [](u64 a, u64, u64) -> u64 { return narrow_f16(single(a)).bits; });
	auto rounded = [up = rounding == "rpi", down = rounding == "rmi", cut = rounding == "rzi",
					even = rounding == "rni"](f64 x) {
		x = up ? std::ceil(x) : down ? std::floor(x) : x;
		return cut ? std::trunc(x) : even ? std::nearbyint(x) : x;
	};
	auto of = [=](auto read) -> Step {
		if (d == "f32")
			return step(o, [=](u64 a, u64, u64) { return from((f32)rounded(read(a))); });
		if (d == "f64")
			return step(o, [=](u64 a, u64, u64) { return from(rounded(read(a))); });
		if (d == "s32")
			return step(o,
				[=](u64 a, u64, u64) { return u64(u32(saturate<i32>(std::trunc(read(a))))); });
		return step(o, [=](u64 a, u64, u64) { return saturate<i64>(std::trunc(read(a))); });
	};
	return s == "f16" ? of([](u64 a) -> f64 { return widen(f16{(u16)a}); })
		: s == "f32"  ? of([](u64 a) -> f64 { return single(a); })
					  : of([](u64 a) { return bits_as<f64>(a); });
}

inline Step evaluator(const std::vector<std::string> &parts, Operands o) {
	const std::string &t = parts.back();
	if (parts[0] == "cvt")
		return conversion(parts.size() == 4 ? parts[1] : "", parts[parts.size() - 2], t, o);
	if (parts[0] == "setp")
		return comparison(parts[1], t, o);
	if (parts[0] == "selp")
		return step(o, [](u64 a, u64 b, u64 c) { return c & 1 ? a : b; });
	if (parts[0] == "mov" || parts[0] == "cvta")
		return step(o, [](u64 a, u64, u64) { return a; });
	std::string op = parts[1] == "NaN" ? parts[0] + ".NaN" : parts[0];
	bool saturates = std::find(parts.begin(), parts.end(), "sat") != parts.end();
	if (t == "f32")
		return floating<f32, u32>(op, saturates, o);
	if (t == "f64")
		return floating<f64, u64>(op, saturates, o);
	return integral(parts, o);
}

// ---- the text ----

inline std::vector<std::string> split(const std::string &text, char at) {
	std::vector<std::string> parts(1);
	int depth = 0;
	for (char c : text) {
		depth += c == '{' ? 1 : c == '}' ? -1 : 0;
		if (c == at && depth == 0)
			parts.emplace_back();
		else if (c != ' ' && c != '\t')
			parts.back() += c;
	}
	return parts;
}

// Shared memory, of the block that the thread of the host runs.
inline thread_local char held[64 * 1024] __attribute__((aligned(16)));

struct Parser {
	std::shared_ptr<Code> code = std::make_shared<Code>();
	unsigned threads = 0; // of a block at most
	std::vector<std::map<std::string, size_t>> scopes; // registers, of nested braces
	std::map<std::string, size_t> labels;
	std::vector<std::pair<std::shared_ptr<size_t>, std::string>> jumps;

	size_t reg(const std::string &name) const {
		for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope)
			if (auto found = scope->find(name); found != scope->end())
				return found->second;
		throw std::runtime_error("no register " + name);
	}

	std::vector<size_t> group(const std::string &text) const {
		std::vector<size_t> all;
		for (const std::string &name :
			split(text[0] == '{' ? text.substr(1, text.size() - 2) : text, ','))
			all.push_back(reg(name));
		return all;
	}

	static u64 constant(const std::string &text);
	// operand returns the register of an operand.
	size_t operand(const std::string &text) const {
		if (text == "%tid.x")
			return thread;
		if (text == "%ctaid.x")
			return block;
		if (text == "%nctaid.x")
			return blocks;
		if (text[0] == '%')
			return reg(text);
		code->registers.push_back(text == "held" ? 0 : constant(text)); // addresses there: 32 bits
		return code->registers.size() - 1;
	}

	Step access(const std::vector<std::string> &parts, const std::vector<std::string> &args) const;
	Step instruction(const std::string &op, const std::vector<std::string> &args);
	void statement(const std::string &text);
	void line(const std::string &text);
};

inline u64 Parser::constant(const std::string &text) {
	if (text.substr(0, 2) == "0f" || text.substr(0, 2) == "0d")
		return std::stoull(text.substr(2), nullptr, 16);
	return text[0] == '-' ? (u64)std::stoll(text) : std::stoull(text);
}

// copy is memcpy, which is a call if it does not know how much.
inline void copy(void *to, const void *from, size_t n) {
	n == 4 ? memcpy(to, from, 4) : n == 8 ? memcpy(to, from, 8) : memcpy(to, from, n);
}

inline Step Parser::access(const std::vector<std::string> &parts,
	const std::vector<std::string> &args) const {
	size_t size = std::stoul(parts.back().substr(1)) / 8;
	bool load = parts[0] == "ld";
	std::string place = load ? args[1] : args[0], data = load ? args[0] : args[1];
	place = place.substr(1, place.size() - 2);
	if (parts[1] == "param")
		return [r = reg(data), number = code->params.at(place)](State &s) {
			return memcpy(&s.r[r], s.params + 8 * number, 8), next;
		};
	auto sum = split(place, '+');
	bool shared = parts[1] == "shared";
	return [=, base = operand(sum[0]), plus = constant(sum[1]), all = group(data)](State &s) {
		u64 address = s.r[base] + plus + (shared ? (u64)held : 0);
		if (address & (size * all.size() - 1))
			throw std::runtime_error("an access that is not aligned");
		for (size_t i = 0; i < all.size(); i++) {
			void *at = reinterpret_cast<void *>(address + i * size);
			if (load)
				s.r[all[i]] = 0, copy(&s.r[all[i]], at, size);
			else
				copy(at, &s.r[all[i]], size);
		}
		return next;
	};
}

inline Step Parser::instruction(const std::string &op, const std::vector<std::string> &args) {
	auto parts = split(op, '.');
	if (op == "ret")
		return [](State &) { return finish; };
	if (parts[0] == "bar")
		return [](State &) { return emulate::wait_at_barrier(), next; };
	// shfl.sync.bfly.b32 or .idx, whose last but one operand has the segments of a warp above its
	// clamp
	if (parts[0] == "shfl")
		return [r = reg(args[0]), x = operand(args[1]), other = constant(args[2]),
				   segment = constant(args[3]) >> 8, across = parts[2] == "bfly"](State &s) {
			s.r[r] = emulate::together((u32)s.r[x], [=](const u32 *all, u32 lane) {
				return all[across ? lane ^ other : (lane & segment) | other];
			});
			return next;
		};
	if (parts[0] == "bra") {
		auto to = std::make_shared<size_t>();
		jumps.emplace_back(to, args[0]);
		return [to](State &) { return (long)*to; };
	}
	if (parts[0] == "ld" || parts[0] == "st")
		return access(parts, args);
	bool halves = parts[0] == "mov" && (args[0][0] == '{' || args[1][0] == '{');
	u32 width = halves ? std::stoul(parts.back().substr(1)) / 2 : 0;
	u64 mask = (u64(1) << width) - 1;
	if (halves && args[0][0] == '{')
		return [=, both = group(args[0]), x = operand(args[1])](State &s) {
			u64 word = s.r[x];
			return s.r[both[0]] = word & mask, s.r[both[1]] = word >> width, next;
		};
	if (halves)
		return [=, both = group(args[1]), r = reg(args[0])](State &s) {
			return s.r[r] = (s.r[both[0]] & mask) | (s.r[both[1]] & mask) << width, next;
		};
	size_t of[4] = {reg(args[0])};
	for (size_t i = 1; i < 4 && i < args.size(); i++)
		of[i] = operand(args[i]);
	if (code->registers.size() > 1 << 16)
		throw std::runtime_error("more registers than numbers of 16 bits");
	return evaluator(parts, {u16(of[0]), u16(of[1]), u16(of[2]), u16(of[3])});
}

// statement reads most lines, and so does without regular expressions, which are slow.
inline void Parser::statement(const std::string &text) {
	size_t guard = text[0] == '@' ? text.find(' ') : 0, first = guard ? guard + 1 : 0,
		   end = text.find_first_of(" \t;", first);
	std::string op = text.substr(first, end - first);
	if (std::string kind = split(op, '.')[0]; kind == "griddepcontrol" || kind == "prefetch")
		return;
	Step step = instruction(op, split(text.substr(end, text.size() - 1 - end), ','));
	if (bool not_set = text[1] == '!'; guard)
		step = [step, r = reg(text.substr(1 + not_set, guard - 1 - not_set)),
				   on = u64(!not_set)](State &s) { return s.r[r] == on ? step(s) : next; };
	code->steps.push_back(step);
}

inline void Parser::line(const std::string &text) {
	if (!text.empty() && text.back() == ';' && (text[0] == '@' || std::islower(text[0])))
		return statement(text);
	static const std::regex param(R"(\.param \.u64 (\w+),?)"),
		registers(R"(\.reg \.\w+\s+(%\w+)<(\d+)>;)"),
		upper(R"(\{ \.reg \.b32 tmp; mov\.b64 \{tmp, (%\w+)\}, (%\w+); \})"),
		most(R"(\.maxntid (\d+), 1, 1)"),
		ignored(R"(\)|\.shared .*|\.minnctapersm .*)");
	std::smatch found;
	if (text.empty() || std::regex_match(text, ignored))
		return;
	if (std::regex_match(text, found, most))
		threads = std::stoi(found[1]);
	else if (text == "{")
		scopes.emplace_back();
	else if (text == "}")
		scopes.pop_back();
	else if (text.back() == ':')
		labels[text.substr(0, text.size() - 1)] = code->steps.size();
	else if (std::regex_match(text, found, param)) {
		size_t number = code->params.size();
		code->params[found[1]] = number;
	} else if (std::regex_match(text, found, registers))
		for (int i = 0; i < std::stoi(found[2]); i++)
			scopes.back()[found[1].str() + std::to_string(i)] = code->registers.size(),
			code->registers.push_back(0);
	else if (std::regex_match(text, found, upper))
		code->steps.push_back(instruction("shr.u64", {found[1], found[2], "32"}));
	else
		throw std::runtime_error("not known: " + text);
}

// kernels returns those of a text.
inline std::map<std::string, emulate::Kernel> kernels(const std::string &text) {
	static const std::regex entry(R"(\.visible \.entry (\w+)\()");
	std::map<std::string, emulate::Kernel> all;
	std::istringstream in(text);
	std::unique_ptr<Parser> parser;
	std::string name;
	for (std::string line; std::getline(in, line);) {
		line.erase(0, line.find_first_not_of(" \t"));
		std::smatch found;
		if (std::regex_match(line, found, entry)) {
			parser = std::make_unique<Parser>();
			name = found[1];
			continue;
		}
		if (!parser)
			continue;
		parser->line(line);
		if (line != "}" || !parser->scopes.empty())
			continue;
		for (auto &[to, label] : parser->jumps)
			*to = parser->labels.at(label);
		all[name] = {parser->threads, 8 * parser->code->params.size(),
			[code = parser->code](const char *params) { code->run(params); }};
	}
	return all;
}

} // namespace ptx
