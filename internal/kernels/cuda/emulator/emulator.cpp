// Runs the kernels on a host, for tests.
//
//	emulator FILE BASE   runs kernels over the memory of FILE, at address BASE:
//	                     each line of the input is "NAME gx gy bx by words...",
//	                     each line of the output "ok" or what is wrong
//	emulator accuracy n  prints the largest error of each elementary function, in
//	                     units of the last place, of n arguments of each magnitude
//	emulator rounding    checks what devices without instructions for bf16 do instead,
//	                     and prints "ok" or what is wrong
//	emulator kernels     prints the names of the kernels
//
// Numbers are hexadecimal.

#include "../functions.cuh"
#include "../peers.cuh"

#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <random>
#include <sstream>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

// ---- launches ----

static std::string launch(const std::string &line) {
	std::istringstream in(line);
	std::string name;
	emulate::Host &h = emulate::host;
	h.grid = h.block = {};
	in >> std::hex >> name >> h.grid.x >> h.grid.y >> h.block.x >> h.block.y;
	std::vector<u64> words;
	for (u64 w; in >> w;)
		words.push_back(w);
	auto found = emulate::kernels.find(name);
	if (found == emulate::kernels.end())
		return "no kernel " + name;
	const emulate::Kernel &k = found->second;
	if (words.size() * 8 != k.nbytes)
		return name + " takes " + std::to_string(k.nbytes / 8) + " words, got " +
			std::to_string(words.size());
	u32 threads = h.block.x * h.block.y;
	if (threads == 0 || threads > k.threads || h.grid.x == 0 || h.grid.y == 0 || h.grid.y > 65535)
		return name + " cannot be launched with this geometry";
	emulate::launch(k, reinterpret_cast<const char *>(words.data()));
	return "ok";
}

static int serve(const char *file, const char *base) {
	int fd = open(file, O_RDWR);
	struct stat st;
	if (fd < 0 || fstat(fd, &st) < 0)
		return perror(file), 1;
	void *at = reinterpret_cast<void *>(strtoull(base, nullptr, 16));
	if (mmap(at, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0) != at)
		return perror("mmap"), 1;
	for (std::string line; std::getline(std::cin, line);)
		std::cout << launch(line) << std::endl;
	return 0;
}

// ---- accuracy ----

// The distance of two adjacent floats at x.
template <class T> long double unit(long double x) {
	int e = std::max(std::ilogb(x), std::numeric_limits<T>::min_exponent - 1);
	return std::ldexp(1.0L, e - std::numeric_limits<T>::digits + 1);
}

template <class T> double error(T got, long double want) {
	if (want != want)
		return got != got ? 0 : INFINITY;
	if ((T)want == got || std::fabs(want) > std::numeric_limits<T>::max())
		return (T)want == got ? 0 : INFINITY;
	return double(
		std::fabs(got - want) / unit<T>(want == 0 ? std::numeric_limits<T>::min() : want));
}

// Arguments: all magnitudes, and more of those in the middle.
template <class T, class B> std::vector<T> arguments(int n) {
	std::mt19937_64 random(1);
	std::vector<T> xs{0, -T(0), 1, -1, INFINITY, -INFINITY, NAN, std::numeric_limits<T>::max(),
		std::numeric_limits<T>::min(), std::numeric_limits<T>::denorm_min()};
	for (int i = 0; i < n; i++)
		xs.push_back(bits_as<T>((B)random()));
	for (double range : {0.01, 1.0, 2.0, 10.0, 100.0, 800.0})
		for (int i = 0; i < n; i++)
			xs.push_back(T(std::uniform_real_distribution<double>(-range, range)(random)));
	return xs;
}

template <class T> long double exact_logistic(T x) {
	long double e = expl(-std::fabs((long double)x));
	return (x < 0 ? e : 1) / (1 + e);
}

template <class T, class B> void measure(const char *type, int n) {
	double worst[9] = {};
	std::vector<T> xs = arguments<T, B>(n);
	auto keep = [](double &worst, double e) { worst = e > worst ? e : worst; };
	for (size_t i = 0; i < xs.size(); i++) {
		T x = xs[i], y = xs[(i * 7919) % xs.size()];
		keep(worst[0], error(exponential(x), expl(x)));
		keep(worst[1], error(logarithm(x), logl(x)));
		keep(worst[2], error(hyperbolic_tangent(x), tanhl(x)));
		keep(worst[3], error(logistic(x), x == x ? exact_logistic(x) : (long double)x));
		keep(worst[4], error(power(x, y), powl(x, y)));
		keep(worst[5], error(exponential_less_one(x), expm1l(x)));
		keep(worst[6], error(logarithm_of_one_plus(x), log1pl(x)));
		keep(worst[7], error(binary_logarithm(x), log2l(x)));
		keep(worst[8],
			error(soft_plus(x), x > 0 ? x + log1pl(expl(-(long double)x)) : log1pl(expl(x))));
	}
	const char *names[] = {"exp", "log", "tanh", "sigmoid", "pow", "expm1", "log1p", "log2",
		"softplus"};
	for (int f = 0; f < 9; f++)
		std::printf("%s_%s %.3f\n", names[f], type, worst[f]);
}

// ---- rounding ----

// rounded_bf16 is what cvt.rn.bf16.f32 is said to give: the nearer neighbour, the even one of two
// that are as near, and one NaN for all.
static u16 rounded_bf16(f32 x) {
	u32 b = bits_as<u32>(x), toward_zero = b >> 16;
	if (x != x)
		return 0x7fff;
	if (std::isinf(x))
		return toward_zero;
	double below = std::fabs(bits_as<f32>(toward_zero << 16)),
		   above = std::fabs(bits_as<f32>((toward_zero + 1) << 16));
	if (std::isinf(above))
		above = 0x1p128; // where numbers would go on
	double low = std::fabs((double)x) - below, high = above - std::fabs((double)x);
	return toward_zero + (low > high || (low == high && (toward_zero & 1)));
}

// All upper halves, with those lower ones between which the result changes, and others.
static int rounding() {
	std::mt19937 random(1);
	for (u32 top = 0; top <= 0xffff; top++) {
		f32 back = widen(bf16{(u16)top});
		if (bits_as<u32>(back) != top << 16)
			return std::printf("%x is widened to %x\n", top, bits_as<u32>(back)), 1;
		std::vector<u32> lows{0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
		for (int i = 0; i < 32; i++)
			lows.push_back(random() & 0xffff);
		for (u32 low : lows) {
			f32 x = bits_as<f32>(top << 16 | low);
			bf16 sum;
			peers::narrow(sum, x);
			// which keeps the payload
			u16 want = rounded_bf16(x), cast = x == x ? want : top | 0x40;
			if (sum.bits != want || narrow_bf16(x).bits != cast)
				return std::printf("%x becomes %x in sums, want %x, and %x in casts, want %x\n",
						   bits_as<u32>(x), sum.bits, want, narrow_bf16(x).bits, cast),
					   1;
		}
	}
	return std::printf("ok\n"), 0;
}

int main(int argc, char **argv) {
	std::string verb = argc > 1 ? argv[1] : "";
	if (verb == "rounding")
		return rounding();
	if (verb == "accuracy" && argc == 3) {
		measure<f32, u32>("f32", std::stoi(argv[2]));
		measure<f64, u64>("f64", std::stoi(argv[2]));
		return 0;
	}
	if (verb == "kernels") {
		for (auto &[name, kernel] : emulate::kernels)
			std::cout << name << " " << kernel.nbytes << " " << kernel.threads << "\n";
		return 0;
	}
	if (argc == 3)
		return serve(argv[1], argv[2]);
	std::cerr << "usage: emulator FILE BASE | accuracy N | rounding | kernels\n";
	return 2;
}
