// Layers of long short-term memory, all steps in one kernel: lstm_NUMBERS_f32, and
// lstmgrad_NUMBERS_f32, which goes back. NUMBERS are those that are multiplied, f32, tf32 or bf16.
//
// A block has 16 units of 16 samples, keeps their weights in registers, and takes all steps. The
// blocks with the same samples need each other's results: what they exchange is `unwritten` before
// the kernel, and each looks until it is not. So all blocks must run at a time.

#include "functions.cuh"
#include "system.cuh"
#include "tensor.cuh"

// ---- kernels ----

constexpr u32 side = 16; // samples of a block, and its units
constexpr u32 cell_threads = side * side, cell_warps = cell_threads / 32;
constexpr u32 unwritten = 0xffffffff; // a NaN, or two, that no arithmetic gives

struct Layer {
	u64 steps, batch, size, reverse;

	// The place of h behind so many steps, and of the step behind them.
	DEVICE u64 state(u64 k) const { return reverse ? steps - k : k; }
	DEVICE u64 step(u64 k) const { return reverse ? steps - 1 - k : k; }
};

// Words that other blocks read or write while this one runs, in any order.
#if defined(__CUDA__) || defined(__NVCC__)
DEVICE void look(u32 (&x)[4], const u32 *p) {
	asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
		: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p) : "memory");
}
DEVICE void show(u32 *p, u32 x) {
	asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
#else
DEVICE void look(u32 (&x)[4], const u32 *p) {
	for (u32 i = 0; i < 4; i++)
		x[i] = get_word(p + i);
}
DEVICE void show(u32 *p, u32 x) { put_word(p, x); }
#endif

// Wait ends after some seconds, if blocks do not run at a time in spite of all: what is missing is
// NaN then, and so are the results.
struct Wait {
	static constexpr u64 limit = 20000000000;
	u64 began = 0;
	bool over = false;

	DEVICE void until_written(u32 (&x)[4], const u32 *p) {
		for (u32 looks = 1; !over; looks++) {
			if (x[0] != unwritten && x[1] != unwritten && x[2] != unwritten && x[3] != unwritten)
				return;
			relax();
			look(x, p);
			if (looks % 4096 != 0)
				continue;
			u64 now = nanoseconds();
			began = began == 0 ? now : began;
			over = now - began > limit;
		}
	}
};

// What a block multiplies with its weights: rows of words, of which `pitch` are in one, and `rows`
// there.
struct Words {
	const u32 *first;
	u64 pitch;
	u32 rows;

	DEVICE bool there(u32 row, u32 word) const { return row < rows && word < pitch; }
	DEVICE void look_at(u32 (&x)[4], u32 row, u32 word) const {
		if (there(row, word))
			return look(x, first + row * pitch + word);
#pragma unroll
		for (u32 i = 0; i < 4; i++)
			x[i] = 0;
	}
	DEVICE void await(Wait &wait, u32 (&x)[4], u32 row, u32 word) const {
		if (there(row, word))
			wait.until_written(x, first + row * pitch + word);
	}
	// Waits for four of the warp's n words of the last rows by each thread of it. They are written
	// last, and looks at all words, again and again, would be in the way of what all wait for.
	DEVICE void await_some(Wait &wait, u32 word, u32 n) const {
		constexpr u32 lanes = 32;
		u32 lane = thread_x() % lanes, fours = n / 4, in_row = least(fours, lanes), x[4];
		u32 row = rows - 1 - lane / in_row;
		word += lane % in_row * (fours / in_row) * 4;
		look_at(x, row, word);
		await(wait, x, row, word);
		meet();
	}
};

// Weights: columns of a block's product, and what is summed over.
struct Weights {
	const f32 *first;
	u64 along, depth; // from one of what is summed over to the next, and how many there are
	u64 column, gate; // from one column to the next, or from one gate of a unit to the next

	DEVICE f32 at(u32 n, u64 k) const {
		return k < depth ? first[(gate ? n / 4 * column + n % 4 * gate : n * column) + k * along]
						 : 0;
	}
};

// A warp's part of a block's product: sums over a part of what is summed over, for all columns.
template <u32 columns> struct Part { f32 of[side][columns + 8]; };

template <class Numbers, u32 columns> struct Share;

// What ordinary cores multiply: numbers of which a word has n, in f32, or those of bf16.
template <u32 n> struct Ordinary {
	static constexpr u32 per_word = n;
	static DEVICE f32 sigmoid(f32 x) { return logistic(x); }
	static DEVICE f32 tanh(f32 x) { return hyperbolic_tangent(x); }
	static DEVICE f32 round(f32 x) { return n == 1 ? x : widen(narrow_bf16(x)); }
	static DEVICE f32 number(u32 word, u32 i) {
		return n == 1 ? bits_as<f32>(word) : widen(bf16{(u16)(word >> 16 * i)});
	}
	static DEVICE u32 pair(f32 low, f32 high) {
		return narrow_bf16(low).bits | (u32)narrow_bf16(high).bits << 16;
	}
};

// On ordinary cores a thread has two columns, and sums over `each`. The words of four samples at a
// time are in shared memory, where those of a thread's sums begin in banks of their own.
template <u32 n, u32 columns> struct Share<Ordinary<n>, columns> {
	static constexpr u32 each = 64, chunks = 64 / columns, depth = each * chunks;
	static constexpr u32 samples = 4, pitch = each + 4, in_row = depth / n / 4;
	static constexpr u32 fours = samples * in_row / 32;
	typedef f32 Stage[cell_warps][samples][chunks][pitch];
	f32 w[each][2];

	static DEVICE u32 lane() { return thread_x() % 32; }
	static DEVICE u32 column() { return lane() % (columns / 2) * 2; }
	static DEVICE u32 chunk() { return lane() / (columns / 2); }
	static DEVICE u32 warp() { return thread_x() / 32; }

	DEVICE Share(const Weights &weights) {
#pragma unroll
		for (u32 k = 0; k < each; k++)
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				w[k][i] = Ordinary<n>::round(
					weights.at(column() + i, warp() * depth + chunk() * each + k));
	}

	DEVICE void multiply(Part<columns> &part, Stage &all, const Words &words, Wait &wait) const {
		auto &stage = all[warp()];
		u32 x[fours][4];
		auto row = [](u32 i) { return (i * 32 + lane()) / in_row; };
		auto word = [](u32 i) { return (i * 32 + lane()) % in_row * 4; };
		auto look = [&](u32 sample) {
#pragma unroll
			for (u32 i = 0; i < fours; i++)
				words.look_at(x[i], sample + row(i), warp() * in_row * 4 + word(i));
		};
		words.await_some(wait, warp() * in_row * 4, in_row * 4);
		look(0);
#pragma unroll 1
		for (u32 sample = 0; sample < side; sample += samples) {
			meet();
#pragma unroll
			for (u32 i = 0; i < fours; i++) {
				words.await(wait, x[i], sample + row(i), warp() * in_row * 4 + word(i));
				f32 y[4 * n];
#pragma unroll
				for (u32 e = 0; e < 4 * n; e++)
					y[e] = Ordinary<n>::number(x[i][e / n], e % n);
				store(&stage[row(i)][word(i) * n / each][word(i) * n % each], y);
			}
			meet();
			if (sample + samples < side)
				look(sample + samples);
			f32 sum[samples][2] = {};
#pragma unroll
			for (u32 k = 0; k < each; k += 4)
#pragma unroll
				for (u32 s = 0; s < samples; s++) {
					f32 h[4];
					load(h, &stage[s][chunk()][k]);
#pragma unroll
					for (u32 e = 0; e < 4; e++)
#pragma unroll
						for (u32 i = 0; i < 2; i++)
							sum[s][i] = fused(h[e], w[k + e][i], sum[s][i]);
				}
#pragma unroll
			for (u32 s = 0; s < samples; s++) {
#pragma unroll
				for (u32 apart = columns / 2; apart < 32; apart *= 2)
#pragma unroll
					for (u32 i = 0; i < 2; i++)
						sum[s][i] += across(sum[s][i], apart);
				if (chunk() == 0)
					store(&part.of[sample + s][column()], sum[s]);
			}
		}
	}
};

#if TENSOR_CORES

// Functions of sums of rounded products, which need not be right to the last place.
struct Rounded {
#if AMPERE
	static DEVICE f32 sigmoid(f32 x) {
		f32 power, y;
		asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.44269504f * x));
		asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1 + power));
		return y;
	}
	static DEVICE f32 tanh(f32 x) { return fused(2, sigmoid(2 * x), -1); }
#else
	static DEVICE f32 sigmoid(f32 x) { return logistic(x); }
	static DEVICE f32 tanh(f32 x) { return hyperbolic_tangent(x); }
#endif
};

struct Tf32 : Rounded {
	typedef tf32 Type;
	static constexpr u32 per_word = 1;
	static DEVICE u32 word(const Weights &w, u32 n, u64 at) {
		return narrow_tf32(w.at(n, at)).bits;
	}
	static DEVICE u32 operand(u32 x) { return narrow_tf32(bits_as<f32>(x)).bits; }
};

struct Bf16 : Rounded {
	typedef bf16 Type;
	static constexpr u32 per_word = 2;
	static DEVICE u32 pair(f32 low, f32 high) { return pair_of_bf16(low, high); }
	static DEVICE u32 word(const Weights &w, u32 n, u64 at) {
		return pair(w.at(n, 2 * at), w.at(n, 2 * at + 1));
	}
	static DEVICE u32 operand(u32 x) { return x; }
};

// On tensor cores a warp has 16 words of each row in a tile, of which a thread has four neighbours:
// two fragments are made of them. It does not matter which of what is summed over is where, if it
// is where its weights are.
template <class Numbers, u32 columns> struct Share {
	static constexpr u32 depth = 4096 / columns / Numbers::per_word, tiles = depth / 16;
	static constexpr u32 ahead = 2, fragments = columns / 8;
	static constexpr u32 chains = fragments < 4 ? 2 : 1; // sums that do not wait for each other
	typedef u32 Stage[1];
	u32 w[tiles][2][fragments][2];

	static DEVICE u32 row() { return thread_x() % 32 / 4; }
	static DEVICE u32 word(u32 tile) {
		return thread_x() / 32 * depth + tile * 16 + thread_x() % 4 * 4;
	}

	DEVICE Share(const Weights &weights) {
#pragma unroll
		for (u32 t = 0; t < tiles; t++)
#pragma unroll
			for (u32 i = 0; i < 4; i++)
#pragma unroll
				for (u32 j = 0; j < fragments; j++)
					w[t][i / 2][j][i % 2] = Numbers::word(weights, 8 * j + row(), word(t) + i);
	}

	DEVICE void multiply(Part<columns> &part, Stage &, const Words &words, Wait &wait) const {
		u32 x[2][ahead][2][4];
		auto look = [&](u32 tile) {
#pragma unroll
			for (u32 t = 0; t < ahead; t++)
#pragma unroll
				for (u32 half = 0; half < 2; half++)
					words.look_at(x[tile / ahead % 2][t][half], row() + 8 * half, word(tile + t));
		};
		f32 sum[chains][fragments][4] = {};
		words.await_some(wait, thread_x() / 32 * depth, depth);
		look(0);
#pragma unroll
		for (u32 tile = 0; tile < tiles; tile += ahead) {
			if (tile + ahead < tiles)
				look(tile + ahead);
#pragma unroll
			for (u32 t = 0; t < ahead; t++) {
				auto &now = x[tile / ahead % 2][t];
#pragma unroll
				for (u32 half = 0; half < 2; half++)
					words.await(wait, now[half], row() + 8 * half, word(tile + t));
#pragma unroll
				for (u32 i = 0; i < 4; i += 2) {
					u32 a[4] = {Numbers::operand(now[0][i]), Numbers::operand(now[1][i]),
						Numbers::operand(now[0][i + 1]), Numbers::operand(now[1][i + 1])};
#pragma unroll
					for (u32 j = 0; j < fragments; j++)
						multiply_fragments(typename Numbers::Type{}, sum[t % chains][j], a,
							w[tile + t][i / 2][j][0], w[tile + t][i / 2][j][1]);
				}
			}
		}
#pragma unroll
		for (u32 j = 0; j < fragments; j++)
#pragma unroll
			for (u32 e = 0; e < 4; e += 2) {
				f32 both[2] = {sum[0][j][e], sum[0][j][e + 1]};
				if (chains == 2)
					both[0] += sum[chains - 1][j][e], both[1] += sum[chains - 1][j][e + 1];
				store(&part.of[row() + 4 * e][8 * j + thread_x() % 4 * 2], both);
			}
	}
};

#endif

// A thread's place: a sample and a unit.
struct Cell {
	u64 batch, size, sample, unit;

	DEVICE Cell(const Layer &l) : batch(l.batch), size(l.size) {
		sample = block_x() * side + thread_x() / side;
		unit = block_y() * side + thread_x() % side;
	}
	DEVICE bool there() const { return sample < batch; }
	DEVICE u64 at(u64 plane) const { return (plane * batch + sample) * size + unit; }
	DEVICE u64 gate(u64 step, u32 g) const {
		return ((step * batch + sample) * 4 + g) * size + unit;
	}
	// The words of the samples of the block, of n numbers each.
	template <class Numbers> DEVICE Words words(const u32 *all, u64 plane, u64 n) const {
		u64 first = block_x() * side, pitch = n / Numbers::per_word;
		return {all + (plane * batch + first) * pitch, pitch, (u32)least(batch - first, (u64)side)};
	}
};

// Writes a number, and gives it to the other blocks. Of two neighbours that share a word, the one
// that is odd, or even, writes it.
template <class Numbers>
DEVICE void give(const Cell &cell, f32 *numbers, u32 *words, u64 at, u32 odd, f32 x) {
	u32 word = bits_as<u32>(x);
	if constexpr (Numbers::per_word == 2) {
		f32 other = across(x, 1);
		word = cell.unit % 2 ? Numbers::pair(other, x) : Numbers::pair(x, other);
	}
	if (cell.there() && (Numbers::per_word == 1 || cell.unit % 2 == odd))
		show(words + at / Numbers::per_word, word == unwritten ? 0x7fffffff : word);
	if (cell.there() && Numbers::per_word == 2)
		numbers[at] = x;
}

// The sums of what the warps have, of some neighbouring columns.
template <u32 n, u32 columns>
DEVICE void total(f32 (&sum)[n], const Part<columns> (&parts)[cell_warps], u32 column) {
	barrier();
#pragma unroll
	for (u32 i = 0; i < n; i++)
		sum[i] = 0;
#pragma unroll
	for (u32 w = 0; w < cell_warps; w++) {
		f32 x[n];
		load(x, &parts[w].of[thread_x() / side][column]);
#pragma unroll
		for (u32 i = 0; i < n; i++)
			sum[i] += x[i];
	}
	barrier();
}

// See kernels.LSTM. words are all, or its numbers in bf16.
template <class Numbers>
DEVICE void lstm(f32 *all, f32 *kept, u32 *words, const f32 *input, const f32 *h0, const f32 *c0,
	const f32 *weights, const Layer &layer) {
	typedef Share<Numbers, 4 * side> Multiplied;
	SHARED Part<4 * side> parts[cell_warps];
	SHARED typename Multiplied::Stage stage;
	u64 size = layer.size;
	Cell cell(layer);
	bool there = cell.there();
	Multiplied share({weights + block_y() * side * size, 1, size, size, size * size});
	Wait wait;
	f32 h = there ? h0[cell.at(0)] : 0, c = there ? c0[cell.at(0)] : 0;
	for (u64 k = 0;; k++) {
		u64 place = layer.state(k);
		give<Numbers>(cell, all, words, cell.at(place), 0, h);
		if (k == layer.steps)
			break;
		f32 a[4] = {}, sum[4];
#pragma unroll
		for (u32 g = 0; g < 4; g++)
			if (there)
				a[g] = input[cell.gate(layer.step(k), g)];
		share.multiply(parts[thread_x() / 32], stage, cell.words<Numbers>(words, place, size),
			wait);
		total(sum, parts, thread_x() % side * 4);
		f32 i = Numbers::sigmoid(a[0] + sum[0]), f = Numbers::sigmoid(a[1] + sum[1]),
			g = Numbers::tanh(a[2] + sum[2]), o = Numbers::sigmoid(a[3] + sum[3]);
		f32 keep[5] = {c, i, f, g, o};
		c = f * c + i * g;
		h = o * Numbers::tanh(c);
#pragma unroll
		for (u32 n = 0; n < 5; n++)
			if (there)
				kept[cell.at(5 * k + n)] = keep[n];
	}
	give<Numbers>(cell, all, words, cell.at(layer.steps + 1), 0, c);
}

// See kernels.LSTMGrad. words are gates, or their numbers in bf16.
template <class Numbers>
DEVICE void lstm_grad(f32 *gates, u32 *words, const f32 *all, const f32 *kept, const f32 *dy,
	const f32 *dc_last, const f32 *weights, const Layer &layer) {
	typedef Share<Numbers, side> Multiplied;
	SHARED Part<side> parts[cell_warps];
	SHARED typename Multiplied::Stage stage;
	u64 size = layer.size, steps = layer.steps;
	Cell cell(layer);
	bool there = cell.there();
	Multiplied share({weights + block_y() * side, size, 4 * size, 1, 0});
	Wait wait;
	f32 c = there ? all[cell.at(steps + 1)] : 0, dc = there ? dc_last[cell.at(0)] : 0;
	for (u64 k = steps; k-- > 0;) {
		u64 step = layer.step(k);
		f32 keep[5] = {}, dh = there ? dy[cell.at(step)] : 0, sum[1] = {};
#pragma unroll
		for (u32 n = 0; n < 5; n++)
			if (there)
				keep[n] = kept[cell.at(5 * k + n)];
		f32 before = keep[0], i = keep[1], f = keep[2], g = keep[3], o = keep[4],
			tanh = Numbers::tanh(c);
		if (k + 1 < steps) {
			share.multiply(parts[thread_x() / 32], stage,
				cell.words<Numbers>(words, layer.step(k + 1), 4 * size), wait);
			total(sum, parts, thread_x() % side);
		}
		dh += sum[0];
		dc += dh * o * (1 - tanh * tanh);
		f32 d[4] = {dc * g * (i * (1 - i)), dc * before * (f * (1 - f)), dc * i * (1 - g * g),
			dh * tanh * (o * (1 - o))};
#pragma unroll
		for (u32 n = 0; n < 4; n++)
			give<Numbers>(cell, gates, words, cell.gate(step, n), n % 2, d[n]);
		c = before, dc *= f;
	}
#pragma unroll
	for (u32 n = 0; n < 4; n++)
		give<Numbers>(cell, gates, words, cell.gate(steps, n), n % 2, n == 0 ? dc : 0);
}

#define LSTM(name, Numbers) \
	TOGETHER_KERNEL(lstm_##name##_f32, cell_threads, f32 *all, f32 *kept, u32 *words, \
		const f32 *input, const f32 *h0, const f32 *c0, const f32 *weights, u64 steps, u64 batch, \
		u64 size, u64 reverse) { \
		lstm<Numbers>(all, kept, words, input, h0, c0, weights, {steps, batch, size, reverse}); \
	} \
	TOGETHER_KERNEL(lstmgrad_##name##_f32, cell_threads, f32 *gates, u32 *words, const f32 *all, \
		const f32 *kept, const f32 *dy, const f32 *dc, const f32 *weights, u64 steps, u64 batch, \
		u64 size, u64 reverse) { \
		lstm_grad<Numbers>(gates, words, all, kept, dy, dc, weights, \
			{steps, batch, size, reverse}); \
	}

LSTM(f32, Ordinary<1>)
#if TENSOR_CORES
LSTM(tf32, Tf32)
LSTM(bf16, Bf16)
#else // and for tf32 those of f32 are launched: see Entry.plain
LSTM(bf16, Ordinary<2>)
#endif

// ---- launch ----
//
// 256 threads, and all blocks at a time. The x axis of the grid is samples, the y axis units: where
// blocks that wait for each other follow each other, a step takes up to 1 us more.
