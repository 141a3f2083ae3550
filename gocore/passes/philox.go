package passes

// Philox is the counter-based generator Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"): ten rounds
// that turn a counter of four words and a key of two into four random words. It has no state; any word of the stream can be had at once.
func Philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	const (
		m0, m1 = 0xd2511f53, 0xcd9e8d57
		w0, w1 = 0x9e3779b9, 0xbb67ae85
	)
	c0, c1, c2, c3 := counter[0], counter[1], counter[2], counter[3]
	k0, k1 := key[0], key[1]
	for range 10 {
		p0, p1 := uint64(m0)*uint64(c0), uint64(m1)*uint64(c2)
		c0, c1, c2, c3 = uint32(p1>>32)^c1^k0, uint32(p1), uint32(p0>>32)^c3^k1, uint32(p0)
		k0 += w0
		k1 += w1
	}
	return [4]uint32{c0, c1, c2, c3}
}
