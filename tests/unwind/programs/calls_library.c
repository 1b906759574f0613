/* Works inside the library. */
long library_down(int depth);
static volatile long sink;

int main(void)
{
	for (int n = 0;; n++)
		sink += library_down(n % 40);
}
